"""System call numbers on x86_64 and aarch64, from the kernel's headers.

`seccomp` says which of them a program may make.
"""

import platform

_TABLE = """
access 21 - | add_key 248 217 | alarm 37 - | arch_prctl 158 - | bind 49 200 | bpf 321 280 | brk 12 214 |
capget 125 90 | capset 126 91 | chdir 80 49 | chmod 90 - | chroot 161 51 | clock_getres 229 114 |
clock_gettime 228 113 | clock_nanosleep 230 115 | clone 56 220 | clone3 435 435 | close 3 57 | close_range 436 436 |
connect 42 203 | copy_file_range 326 285 | creat 85 - | dup 32 23 | dup2 33 - | dup3 292 24 | epoll_create 213 - |
epoll_create1 291 20 | epoll_ctl 233 21 | epoll_pwait 281 22 | epoll_pwait2 441 441 | epoll_wait 232 - |
eventfd 284 - | eventfd2 290 19 | execve 59 221 | execveat 322 281 | exit 60 93 | exit_group 231 94 |
faccessat 269 48 | faccessat2 439 439 | fadvise64 221 223 | fallocate 285 47 | fanotify_init 300 262 | fchdir 81 50 |
fchmod 91 52 | fchmodat 268 53 | fcntl 72 25 | fdatasync 75 83 | fgetxattr 193 10 | flistxattr 196 13 | flock 73 32 |
fork 57 - | fstat 5 80 | fstatfs 138 44 | fsync 74 82 | ftruncate 77 46 | futex 202 98 | futimesat 261 - |
getcpu 309 168 | getcwd 79 17 | getdents 78 - | getdents64 217 61 | getegid 108 177 | geteuid 107 175 |
getgid 104 176 | getgroups 115 158 | getitimer 36 102 | getpeername 52 205 | getpgid 121 155 | getpgrp 111 - |
getpid 39 172 | getppid 110 173 | getpriority 140 141 | getrandom 318 278 | getresgid 120 150 | getresuid 118 148 |
getrlimit 97 163 | getrusage 98 165 | getsid 124 156 | getsockname 51 204 | getsockopt 55 209 | gettid 186 178 |
gettimeofday 96 169 | getuid 102 174 | getxattr 191 8 | inotify_init1 294 26 | io_uring_setup 425 425 | ioctl 16 29 |
kcmp 312 272 | keyctl 250 219 | kill 62 129 | landlock_add_rule 445 445 | landlock_create_ruleset 444 444 |
landlock_restrict_self 446 446 | lgetxattr 192 9 | link 86 - | linkat 265 37 | listxattr 194 11 | llistxattr 195 12 |
lseek 8 62 | lstat 6 - | madvise 28 233 | membarrier 324 283 | memfd_create 319 279 | mincore 27 232 | mkdir 83 - |
mkdirat 258 34 | mknod 133 - | mknodat 259 33 | mlock 149 228 | mmap 9 222 | mount 165 40 | mount_setattr 442 442 |
move_mount 429 429 | mprotect 10 226 | mq_open 240 180 | mremap 25 216 | msgget 68 186 | msync 26 227 |
munmap 11 215 | name_to_handle_at 303 264 | nanosleep 35 101 | newfstatat 262 79 | open 2 - |
open_by_handle_at 304 265 | open_tree 428 428 | openat 257 56 | pause 34 - | perf_event_open 298 241 |
personality 135 92 | pidfd_open 434 434 | pidfd_send_signal 424 424 | pipe 22 - | pipe2 293 59 | pivot_root 155 41 |
poll 7 - | ppoll 271 73 | prctl 157 167 | pread64 17 67 | preadv 295 69 | preadv2 327 286 | prlimit64 302 261 |
process_vm_readv 310 270 | process_vm_writev 311 271 | pselect6 270 72 | ptrace 101 117 | pwrite64 18 68 |
pwritev 296 70 | pwritev2 328 287 | read 0 63 | readahead 187 213 | readlink 89 - | readlinkat 267 78 | readv 19 65 |
recvfrom 45 207 | rename 82 - | renameat 264 38 | renameat2 316 276 | request_key 249 218 | restart_syscall 219 128 |
rmdir 84 - | rseq 334 293 | rt_sigaction 13 134 | rt_sigpending 127 136 | rt_sigprocmask 14 135 |
rt_sigreturn 15 139 | rt_sigsuspend 130 133 | rt_sigtimedwait 128 137 | sched_get_priority_max 146 125 |
sched_get_priority_min 147 126 | sched_getaffinity 204 123 | sched_getparam 143 121 | sched_getscheduler 145 120 |
sched_rr_get_interval 148 127 | sched_yield 24 124 | seccomp 317 277 | select 23 - | semget 64 190 | sendfile 40 71 |
sendmsg 46 211 | sendto 44 206 | set_robust_list 273 99 | set_tid_address 218 96 | setitimer 38 103 | setns 308 268 |
setpgid 109 154 | setrlimit 160 164 | setsid 112 157 | setuid 105 146 | shmget 29 194 | shutdown 48 210 |
sigaltstack 131 132 | signalfd 282 - | signalfd4 289 74 | socket 41 198 | socketpair 53 199 | stat 4 - |
statfs 137 43 | statx 332 291 | symlink 88 - | symlinkat 266 36 | sysinfo 99 179 | tgkill 234 131 | time 201 - |
timer_create 222 107 | timer_delete 226 111 | timer_getoverrun 225 109 | timer_gettime 224 108 |
timer_settime 223 110 | timerfd_create 283 85 | timerfd_gettime 287 87 | timerfd_settime 286 86 | times 100 153 |
truncate 76 45 | umask 95 166 | umount2 166 39 | uname 63 160 | unlink 87 - | unlinkat 263 35 | unshare 272 97 |
userfaultfd 323 282 | utime 132 - | utimensat 280 88 | utimes 235 - | vfork 58 - | wait4 61 260 | waitid 247 95 |
write 1 64 | writev 20 66
"""
"""name, number on x86_64, number on aarch64; "-" where the architecture has no such call."""

COLUMNS = {"x86_64": 1, "aarch64": 2}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Architecture of a system call, as a seccomp filter sees it."""


def numbers(machine: str) -> dict[str, int]:
    """Return the numbers by name. ValueError for an unknown architecture.

    >>> numbers("x86_64")["read"], numbers("aarch64")["read"]
    (0, 63)
    """
    if machine not in COLUMNS:
        raise ValueError(f"the sandbox needs one of {', '.join(COLUMNS)}, got {machine}")
    rows = [cell.split() for cell in _TABLE.replace("\n", " ").split("|")]
    return {row[0]: int(row[COLUMNS[machine]]) for row in rows if row[COLUMNS[machine]] != "-"}


def this_machine() -> str:
    """Return this machine's name, as in the tables."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
