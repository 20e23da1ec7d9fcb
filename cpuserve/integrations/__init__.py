"""Integrations with other systems. Each module needs a package that cpuserve does not require."""
