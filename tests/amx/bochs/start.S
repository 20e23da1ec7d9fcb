# Multiboot entry: from 32-bit protected mode to 64-bit mode with all vector and tile registers
# enabled, then main64(multiboot information) in runtime.c. The other CPU begins at `trampoline`, and
# goes to other_main().
.section .multiboot, "a"
.align 4
.long 0x1BADB002, 0, -0x1BADB002

.bss
.align 4096
page_map: .skip 4096
directory_pointers: .skip 4096
directory: .skip 4096
high_directory: .skip 4096
.align 16
stack_low: .skip 65536
stack_top:
other_low: .skip 65536
other_top:
syscall_low_0: .skip 65536
syscall_top_0:
syscall_low_1: .skip 65536
syscall_top_1:
saved_rsp_0: .skip 8
saved_rsp_1: .skip 8

.data
.align 8
gdt: .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff, 0x00af9a000000ffff, 0x00cf92000000ffff
gdt_register: .word 39
  .long gdt

# From 32-bit protected mode to 64-bit mode, with system calls.
.macro enter_long_mode target
  movl $page_map, %eax
  movl %eax, %cr3
  movl %cr4, %eax
  orl $0x40620, %eax                           # PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
  movl %eax, %cr4
  movl $0xc0000080, %ecx
  rdmsr
  orl $0x101, %eax                             # long mode, SYSCALL
  wrmsr
  movl %cr0, %eax
  andl $0xfffffff3, %eax                       # no emulation, no task switch
  orl $0x80000003, %eax                        # paging
  movl %eax, %cr0
  lgdt gdt_register
  ljmp $24, $\target
.endm

# In 64-bit mode: segments and all vector and tile registers.
.macro enable_registers
  movl $16, %eax
  movl %eax, %ds
  movl %eax, %es
  movl %eax, %ss
  xorl %ecx, %ecx
  xorl %edx, %edx
  movl $0x600e7, %eax                          # x87, SSE, AVX, AVX-512, tile configuration and data
  xsetbv
  fninit
.endm

.text
.code32
.global _start
_start:
  cli
  movl %ebx, %ebp
  movl $stack_top, %esp
  movl $directory_pointers + 3, page_map       # present, writable
  movl $directory + 3, directory_pointers
  movl $directory, %edi
  movl $0x83, %eax                             # 2 MB pages, one to one: the first GB
  movl $512, %ecx
1:movl %eax, (%edi)
  addl $8, %edi
  addl $0x200000, %eax
  loop 1b
  movl $high_directory + 3, directory_pointers + 24
  movl $0xfee00093, high_directory + 503 * 8   # the interrupt controllers, not cached
  enter_long_mode long_mode

# Where the other CPU begins, in 16-bit mode; runtime.c copies it to TRAMPOLINE.
.code16
.global trampoline, trampoline_end
trampoline:
  cli
  xorw %ax, %ax
  movw %ax, %ds
  lgdtl 0x8000 + trampoline_gdt - trampoline
  movl %cr0, %eax
  orl $1, %eax
  movl %eax, %cr0
  ljmpl $8, $other_protected
.align 8
trampoline_gdt: .word 39
  .long gdt
trampoline_end:
.code32
other_protected:
  movl $16, %eax
  movl %eax, %ds
  movl %eax, %es
  movl %eax, %ss
  enter_long_mode other_long_mode
.code64
other_long_mode:
  enable_registers
  movl $other_top, %esp
  call other_main

long_mode:
  enable_registers
  movl $stack_top, %esp
  movl %ebp, %edi
  call main64
2:hlt
  jmp 2b

# enter(entry, stack): starts the program.
.global enter
enter:
  movq %rsi, %rsp
  xorl %edx, %edx
  xorl %ebp, %ebp
  jmp *%rdi

# resume(address, stack): continues a new thread, whose clone() returns 0.
.global resume
resume:
  movq %rsi, %rsp
  xorl %eax, %eax
  jmp *%rdi

# SYSCALL stays in ring 0: the return address is in rcx, the flags in r11. On a stack of its own,
# because the program's red zone lies below its stack pointer. One entry for each CPU.
.macro syscall_entry cpu
.global syscall_entry_\cpu
syscall_entry_\cpu:
  movq %rsp, saved_rsp_\cpu
  movl $syscall_top_\cpu, %esp
  pushq %rcx
  pushq %r11
  pushq %rdi
  pushq %rsi
  pushq %rdx
  pushq %r10
  pushq %r8
  pushq %r9
  movq %rsp, %rsi                              # the arguments, last first
  movq %rax, %rdi
  movl $\cpu, %edx
  call handle_syscall
  popq %r9
  popq %r8
  popq %r10
  popq %rdx
  popq %rsi
  popq %rdi
  popq %r11
  popq %rcx
  movq saved_rsp_\cpu, %rsp
  pushq %r11
  popfq
  jmp *%rcx
.endm
syscall_entry 0
syscall_entry 1
