"""cpuserve inside other systems. Each module needs a package that cpuserve does not depend on."""
