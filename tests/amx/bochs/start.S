# Multiboot entry: from 32-bit protected mode to 64-bit mode with all vector and tile registers
# enabled, then main64(multiboot information) in runtime.c.
.section .multiboot, "a"
.align 4
.long 0x1BADB002, 0, -0x1BADB002

.bss
.align 4096
page_map: .skip 4096
directory_pointers: .skip 4096
directory: .skip 4096
.align 16
stack_low: .skip 65536
stack_top:
syscall_low: .skip 65536
syscall_top:
saved_rsp: .skip 8

.data
.align 8
gdt: .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff, 0x00af9a000000ffff, 0x00cf92000000ffff
gdt_register: .word 39
  .long gdt

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
  ljmp $24, $long_mode
.code64
long_mode:
  movl $16, %eax
  movl %eax, %ds
  movl %eax, %es
  movl %eax, %ss
  xorl %ecx, %ecx
  xorl %edx, %edx
  movl $0x600e7, %eax                          # x87, SSE, AVX, AVX-512, tile configuration and data
  xsetbv
  fninit
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

# SYSCALL stays in ring 0: the return address is in rcx, the flags in r11. On a stack of its own,
# because the program's red zone lies below its stack pointer.
.global syscall_entry
syscall_entry:
  movq %rsp, saved_rsp
  movl $syscall_top, %esp
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
  call handle_syscall
  popq %r9
  popq %r8
  popq %r10
  popq %rdx
  popq %rsi
  popq %rdi
  popq %r11
  popq %rcx
  movq saved_rsp, %rsp
  pushq %r11
  popfq
  jmp *%rcx
