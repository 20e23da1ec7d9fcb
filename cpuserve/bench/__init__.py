"""Benchmarks: code that `cpuserve bench` and the scripts in benchmarks/ share."""
