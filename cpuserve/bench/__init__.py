"""Measuring: what `cpuserve bench` and the scripts in benchmarks/ share."""
