"""How good the translations of a trained model are, in other ways than by BLEU and chrF."""
