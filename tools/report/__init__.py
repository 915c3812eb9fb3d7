"""A page of the plans beside the published figures."""
