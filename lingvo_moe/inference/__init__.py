"""Translation and its explanation, recognition and segmentation, their scores, and the loss, of trained models."""
