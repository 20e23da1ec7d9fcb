"""POST /completion and /infill."""
