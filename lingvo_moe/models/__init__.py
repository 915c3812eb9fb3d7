"""Models: of translation, language, speech recognition and segmentation of volumes."""
