"""Print the requirements of a wheel except torch packages (install.sh installs their CPU build)."""

import re
import sys
import zipfile

TORCH = {"torch", "torchaudio", "torchvision", "torchcodec"}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
for line in metadata.splitlines():
    if line.startswith("Requires-Dist:") and "extra ==" not in line:
        requirement = line.split(":", 1)[1].strip()
        if re.split(r"[ <>=!~;\[(]", requirement)[0].lower() not in TORCH:
            print(requirement)
