"""Layers of images and volumes, whose spatial dimensions devices may share."""
