"""From a neutral call to its events, for every dialect; it knows no HTTP."""
