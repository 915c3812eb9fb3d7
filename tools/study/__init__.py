"""M4 in miniature: the papers' comparison of translation models, at equal CPU time."""
