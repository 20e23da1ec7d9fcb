"""What the server tells about itself: health, metrics, machine, routes."""
