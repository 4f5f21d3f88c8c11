"""Shuts a worker in once its model is loaded: what a block cannot need, it cannot do either.

A block is Python in the worker's process. After the weights are there, that process starts no program, opens
no connection, changes no file beside those of its saves, and looks into no other process; so the kernel is
told to refuse all of that, for good. Four layers, each of which may be missing: a user of its own (where the
server is root's), no privileges, a filter of system calls over all threads (seccomp), and of files
(Landlock: for the thread that runs blocks and those that come after it).

What it is not: a wall between the users whose blocks share the worker. They see each other's values and can
end the process. On a GPU kernels are compiled when they are first used (Triton, ptxas, a C compiler), so
programs go on to be started there, in the same jail, with a cache of their own. Elsewhere none is: what
compiles after the start, such as torch.compile, is refused.
"""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
#: Linux's third version of how they are told, of 64 bits.
_CAPABILITIES: Final = 0x20080522
_EPERM: Final = 1
_CACHE: Final = "compiled-"
_ENOSYS: Final = 38

#: Layers, as people are told of them.
USER, PRIVILEGES, CALLS, FILES = "own user", "no privileges", "system calls", "files"


class _Machine(NamedTuple):
    """System calls of one architecture.

    Attributes:
        audit: What the kernel calls it.
        seccomp: The number of ``seccomp``.
        capset: The number of ``capset``.
        programs: Calls that start programs, and the processes for them.
        refused: Calls that are refused whatever they are given.
        clone: Of ``clone``: threads only.
        own: Calls whose first argument is a process: this one only.
    """

    audit: int
    seccomp: int
    capset: int
    programs: tuple[int, ...]
    refused: tuple[int, ...]
    clone: int
    own: tuple[int, ...]


#: The same number everywhere: pidfd_send_signal, io_uring_setup, open_tree, move_mount, fsopen, fsmount,
#: pidfd_open, pidfd_getfd, mount_setattr.
_EVERYWHERE: Final = (424, 425, 428, 429, 430, 432, 434, 438, 442)
_CLONE3: Final = 435
_CLONE_THREAD: Final = 0x10000
_MACHINES: Final = {
    "x86_64": _Machine(
        0xC000003E,
        317,
        126,
        (59, 322, 57, 58),  # execve, execveat, fork, vfork
        (
            *(41, 53, 42, 49, 50, 288, 43),  # socket, socketpair, connect, bind, listen, accept4, accept
            *(101, 310, 311),  # ptrace, process_vm_readv, process_vm_writev
            *(165, 166, 155, 161, 272, 308),  # mount, umount2, pivot_root, chroot, unshare, setns
            *(321, 298, 323),  # bpf, perf_event_open, userfaultfd
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(246, 320, 175, 313, 176, 169, 167, 168),  # kexec_load .. file, modules, reboot, swapon, swapoff
            *(304, 164, 227, 200),  # open_by_handle_at, settimeofday, clock_settime, tkill
            *_EVERYWHERE,
        ),
        56,
        (62, 234, 129, 297),  # kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo
    ),
    "aarch64": _Machine(
        0xC00000B7,
        277,
        91,
        (221, 281),
        (
            *(198, 199, 203, 200, 201, 242, 202),
            *(117, 270, 271),
            *(40, 39, 41, 51, 97, 268),
            *(280, 241, 282),
            *(217, 218, 219),
            *(104, 294, 105, 273, 106, 142, 224, 225),
            *(265, 170, 112, 130),
            *_EVERYWHERE,
        ),
        220,
        (129, 131, 138, 240),
    ),
}


def enter(uid: int | None, writable: Sequence[str], *, programs: bool = False) -> dict[str, str]:
    """Shut this process in, for as long as it lives.

    Args:
        uid: Whose it becomes; None where it stays whose it is.
        writable: Folders whose files it goes on writing.
        programs: Whether it goes on starting programs, which are in the jail as it is.

    Returns:
        Layer -> ``yes`` with what it is, or ``no: `` and why. Nothing is raised: a layer that cannot be had
        is missing, and said to be.
    """
    _run_what_cannot_be_compiled()
    libc = ctypes.CDLL(None, use_errno=True)
    user = {} if uid is None else {USER: _said(lambda: _become(libc, uid))}
    if programs and writable:
        _own_cache(Path(writable[-1]))
    return {
        **user,
        PRIVILEGES: _said(lambda: _no_privileges(libc)),
        FILES: _said(lambda: _files(libc, writable)),
        CALLS: _said(lambda: _calls(libc, programs)),  # last: the others need calls that it refuses
    }


def _run_what_cannot_be_compiled() -> None:
    """A function that asks for a compiler at its first call runs as it is written.

    vLLM has such functions on rare ways, as that of a request for logprobs; without this, the first such
    request after the jail ends the engine.
    """
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True


def _said(layer: Callable[[], str]) -> str:
    try:
        return f"yes ({layer()})"
    except _CannotBe as error:
        return f"no: {error}"
    except OSError as error:
        return f"no: the kernel refuses ({error.strerror or error})"


class _CannotBe(Exception):
    """A layer that this machine has not; the message is a clause."""


def _become(libc: ctypes.CDLL, uid: int) -> str:
    try:
        entry = pwd.getpwuid(uid)
        gid, name = entry.pw_gid, entry.pw_name
    except KeyError:
        gid, name = uid, str(uid)
    # Threads of one process that have different users would be worse than none: the C library changes all.
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # The kernel forgets this with every change of user.
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return f"{name}, {uid}"


def _own_cache(folder: Path) -> None:
    """Compile into a folder of this process's own: what a block might put there, no other engine loads."""
    for left in folder.glob(f"{_CACHE}*"):
        if not Path(f"/proc/{left.name.removeprefix(_CACHE)}").exists():
            shutil.rmtree(left, ignore_errors=True)
    own = folder / f"{_CACHE}{os.getpid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return  # nothing is compiled then
    os.environ.update(dict.fromkeys(("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"), str(own)))
    tempfile.tempdir = str(own)


def _no_privileges(libc: ctypes.CDLL) -> str:
    """No capability, and no way to one: root without them is a user, whom files and processes are kept from.

    One of them (CAP_PERFMON) opens the environment of every process, whatever else is refused.
    """
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _failed()
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise _CannotBe(f"capabilities of {platform.machine()} are not known; no new ones are given")
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES, 0))
    none = ctypes.create_string_buffer(24)
    if libc.syscall(machine.capset, header, none) != 0:
        raise _failed()
    return "no capabilities, and none to be had"


def _failed() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# -- files: Landlock ---------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE = 1 << 1
_REMOVE_FILE, _MAKE_REG, _MAKE_DIR, _REMOVE_DIR = 1 << 5, 1 << 8, 1 << 7, 1 << 4
#: All that changes files and folders, by the version that knows it.
_CHANGES = sum(1 << bit for bit in (1, *range(4, 13)))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def _files(libc: ctypes.CDLL, writable: Sequence[str]) -> str:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise _CannotBe("this kernel has no Landlock")
    handled = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attribute = struct.pack("Q", handled)
    ruleset = libc.syscall(_CREATE_RULESET, attribute, len(attribute), 0)
    if ruleset < 0:
        raise _failed()
    try:
        own = (
            (handled & _REFER)
            | _WRITE_FILE
            | _REMOVE_FILE
            | _MAKE_REG
            | _MAKE_DIR
            | _REMOVE_DIR
            | (handled & _TRUNCATE)
        )
        folders = [one for one in dict.fromkeys(writable) if _allow(libc, ruleset, one, own)]
        for device in (*_DEVICES, *map(str, Path("/dev").glob("nvidia*"))):
            if not Path(device).is_dir():
                _allow(libc, ruleset, device, _WRITE_FILE)
        if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            raise _failed()
    finally:
        os.close(ruleset)
    return f"writes in {' and '.join(folders) or 'no folder'} only; no other process is read"


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> bool:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        rule = struct.pack("=Qi", access, opened)
        if libc.syscall(_ADD_RULE, ruleset, 1, rule, 0) != 0:
            raise _failed()
    finally:
        os.close(opened)
    return True


# -- system calls: seccomp ---------------------------------------------------------------------------

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_AT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_FILTER, _ALL_THREADS = 1, 1
_X32 = 0x40000000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def program(machine: str, pid: int, *, programs: bool = False) -> bytes:
    """The filter, as the kernel reads it.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        pid: The process that signals may go to.
        programs: Whether others may be started.
    """
    calls = _MACHINES[machine]

    def one(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    refuse = one(_RETURN, _ERROR | _EPERM)
    allow = one(_RETURN, _ALLOW)
    # Calls by the numbers of another architecture are none that vLLM makes.
    lines = [one(_LOAD, _ARCH_AT), one(_EQUAL, calls.audit, 1, 0), refuse, one(_LOAD, _NUMBER_AT)]
    if machine == "x86_64":
        lines += [one(_AT_LEAST, _X32, 0, 1), refuse]
    for number in (*calls.refused, *(() if programs else calls.programs)):
        lines += [one(_EQUAL, number, 0, 1), refuse]
    if not programs:
        # Its flags lie behind a pointer, where a filter cannot look: the C library goes on with clone.
        lines += [one(_EQUAL, _CLONE3, 0, 1), one(_RETURN, _ERROR | _ENOSYS)]
        lines += [one(_EQUAL, calls.clone, 0, 4), one(_LOAD, _FIRST_AT), one(_ANY_OF, _CLONE_THREAD, 1, 0)]
        lines += [refuse, allow]
    for number in calls.own:
        lines += [one(_EQUAL, number, 0, 4), one(_LOAD, _FIRST_AT), one(_EQUAL, pid, 1, 0), refuse, allow]
    return b"".join([*lines, allow])


def _calls(libc: ctypes.CDLL, programs: bool) -> str:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise _CannotBe(f"no filter is known for {machine}")
    instructions = program(machine, os.getpid(), programs=programs)
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    told = _Program(len(instructions) // 8, ctypes.addressof(kept))
    answer = libc.syscall(_MACHINES[machine].seccomp, _FILTER, _ALL_THREADS, ctypes.byref(told))
    if answer > 0:
        raise _CannotBe(f"thread {answer} has another filter")
    if answer != 0:
        raise _failed()
    if programs:
        return "no sockets, tracing, mounts, or signals to others; programs, which compile a GPU's kernels"
    return "no programs, sockets, tracing, mounts, or signals to others"
