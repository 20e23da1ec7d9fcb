"""Runs a static C++ test program on an emulated CPU with AVX-512 and AMX (Bochs, Sapphire Rapids).

usage: python tests/in_bochs.py PROGRAM [ARGUMENT...]

Exits with the program's code. No operating system runs: tests/amx/bochs answers the program's
system calls. Build the program with -static -Wl,-Ttext-segment=0x10000000. Needs root and the
Debian packages mmdebstrap, isolinux, syslinux-common and xorriso. Bochs 3.0, the first release
with AMX, is in Debian's trixie: it is unpacked into a directory of its own, from the mirror that
apt uses here, and kept (CPUSERVE_BOCHS names the directory).

Bochs 3.0 takes the bytes of all TDPB* products as unsigned, so kernel_tests needs --unsigned here.
Its VCVTNE2PS2BF16 writes the same 16 numbers into both halves, so the program has to be built with
-DCPUSERVE_NO_VCVTNE2PS2BF16; and VPINSRB with an EVEX prefix reads the wrong byte of memory. Only
gcc's SLP vectorizer emits that one here, so the program needs -fno-tree-slp-vectorize.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "amx" / "bochs"
SYSLINUX = Path("/usr/lib/syslinux/modules/bios")
PACKAGES = "bochs,bochs-term,bochsbios,vgabios"
TIMEOUT_S = 3600
FLAGS = [
    "-O2",
    "-ffreestanding",
    "-fno-stack-protector",
    "-fno-pic",
    "-fno-pie",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
    "-Wall",
    "-Wextra",
]
MENU = """default program
prompt 0
timeout 1
label program
  kernel mboot.c32
  append /isolinux/kernel --- /isolinux/program {arguments}
"""
CONFIG = """plugin_ctrl: unmapped=1, biosdev=1, speaker=0, extfpuirq=1, e1000=0, serial=1
config_interface: textconfig
display_library: term
memory: guest=1024, host=1024
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=sapphire_rapids, count=2, ips=200000000, reset_on_triple_fault=0
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={folder}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial
clock: sync=none
log: {folder}/log
panic: action=fatal
"""


def run(*command: str | Path) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stdout}{done.stderr}")


def debian_mirror() -> tuple[str, str]:
    """Address and keyring of Debian's main archive, as apt is set up on this machine."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for part in path.read_text().split("\n\n"):
            fields = dict(re.findall(r"^([\w-]+): *(.+)$", part, re.MULTILINE))
            if "security" not in fields.get("Suites", "security"):
                return fields["URIs"].split()[0], fields["Signed-By"]
    sys.exit("no Debian archive in /etc/apt/sources.list.d")


def bochs_root() -> Path:
    """The directory with Bochs in it, unpacked now if it is not there."""
    default = Path(tempfile.gettempdir()) / "cpuserve-bochs"
    root = Path(os.environ.get("CPUSERVE_BOCHS", default)).absolute()
    if (root / "usr/bin/bochs-bin").exists():
        return root
    uri, keyring = debian_mirror()
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "trixie.list"
        sources.write_text(f"deb [signed-by={keyring}] {uri} trixie main\n")
        options = ["--architectures=amd64", "--variant=extract", f"--include={PACKAGES}"]
        run("mmdebstrap", *options, "trixie", root, sources)
    terminals = root / "usr/share/terminfo/x"
    terminals.mkdir(parents=True, exist_ok=True)
    shutil.copy("/lib/terminfo/x/xterm", terminals)
    return root


def build_image(program: Path, arguments: list[str], folder: Path) -> None:
    """boot.iso: a boot loader, the runtime and the program."""
    tree = folder / "iso" / "isolinux"
    tree.mkdir(parents=True)
    run("gcc", "-c", *FLAGS, HERE / "runtime.c", "-o", folder / "runtime.o")
    run("gcc", "-c", HERE / "start.S", "-o", folder / "start.o")
    objects = [folder / "start.o", folder / "runtime.o"]
    linked = folder / "kernel64"
    run(
        "ld",
        "-n",
        "-z",
        "noexecstack",
        "-T",
        HERE / "link.ld",
        "-e",
        "_start",
        "-o",
        linked,
        *objects,
    )
    run("objcopy", "-O", "elf32-i386", linked, tree / "kernel")
    run("strip", "-o", tree / "program", program)
    shutil.copy("/usr/lib/ISOLINUX/isolinux.bin", tree)
    for name in ("ldlinux.c32", "libcom32.c32", "mboot.c32"):
        shutil.copy(SYSLINUX / name, tree)
    (tree / "isolinux.cfg").write_text(MENU.format(arguments=" ".join(arguments)))
    boot = [
        "-b",
        "isolinux/isolinux.bin",
        "-c",
        "isolinux/boot.cat",
        "-no-emul-boot",
        "-boot-load-size",
        "4",
    ]
    options = ["-quiet", "-J", "-R", *boot, "-boot-info-table", "-o", folder / "boot.iso"]
    run("xorriso", "-as", "mkisofs", *options, folder / "iso")


def emulate(root: Path, folder: Path) -> str:
    """Run Bochs on the image in `folder`, a directory below `root`; returns what was printed."""
    inside = Path("/") / folder.relative_to(root)
    (folder / "bochsrc").write_text(CONFIG.format(folder=inside))
    screen, terminal = pty.openpty()  # the emulated screen: nobody looks at it
    command = ["chroot", str(root), "bochs-bin", "-q", "-f", f"{inside}/bochsrc"]
    with subprocess.Popen(
        ["timeout", str(TIMEOUT_S), *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={
            "TERM": "xterm",
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "LINES": "50",
            "COLUMNS": "132",
        },
    ):
        os.close(terminal)
        try:
            while os.read(screen, 1 << 16):
                pass
        except OSError:  # the emulator has closed its end
            pass
    os.close(screen)
    serial = folder / "serial"
    return serial.read_text(errors="replace") if serial.exists() else ""


def main(argv: list[str]) -> int:
    if not argv:
        sys.exit(__doc__)
    root = bochs_root()
    with tempfile.TemporaryDirectory(dir=root, prefix="run-") as name:
        folder = Path(name)
        build_image(Path(argv[0]), argv[1:], folder)
        text = emulate(root, folder)
        log = (folder / "log").read_text(errors="replace")[-2000:]
    found = re.search(r"\nexit (\d+)\s*$", text)
    print(text.rstrip())
    if not found:
        print(f"the program did not end; the emulator's log ends with:\n{log}")
        return 1
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
