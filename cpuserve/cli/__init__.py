"""The commands of the `cpuserve` program: their flags, their output, and the code they run."""
