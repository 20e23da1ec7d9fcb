"""Who sends requests, the limits of each caller, and the use of these limits."""
