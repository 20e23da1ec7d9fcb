"""The kinds of mmproj files, which have the towers of models of images."""
