// Runs one static Linux program in ring 0 of an emulated CPU, without an operating system: loads the
// ELF file that the boot loader brought as a module, and answers the few system calls that a C++
// program makes which only computes and prints. Output goes to the serial port; "exit N" is its last
// line, with the exit code, and ends the emulator.
#include <elf.h>
#include <stddef.h>
#include <stdint.h>

void enter(uint64_t entry, uint64_t stack);
void syscall_entry(void);

static const uint64_t kHeapEnd = 0x20000000, kMapEnd = 0x2f000000, kStackTop = 0x2ff00000;
static uint64_t heap, mapped = 0x20000000;

enum { kSerial = 0x3f8 };  // COM1

static void out(uint16_t port, uint8_t value) {
  __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port));
}
static uint8_t in(uint16_t port) {
  uint8_t value;
  __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}
static void print(const char* text, size_t n) {
  for (size_t i = 0; i < n; i++) {
    while (!(in(kSerial + 5) & 0x20)) {  // the transmitter is not empty yet
    }
    out(kSerial, (uint8_t)text[i]);
  }
}
static void print_text(const char* text) {
  size_t n = 0;
  while (text[n]) n++;
  print(text, n);
}
static void print_number(uint64_t value) {
  char digits[24];
  size_t at = sizeof digits;
  do {
    digits[--at] = (char)('0' + value % 10);
  } while (value /= 10);
  print(digits + at, sizeof digits - at);
}
static void end(uint64_t code) {
  print_text("\nexit ");
  print_number(code);
  print_text("\n");
  while (!(in(kSerial + 5) & 0x40)) {  // the last byte is still on its way
  }
  for (const char* c = "Shutdown"; *c; c++) out(0x8900, (uint8_t)*c);
  for (;;) __asm__ volatile("hlt");
}

void* memset(void* to, int value, size_t n) {
  for (size_t i = 0; i < n; i++) ((volatile uint8_t*)to)[i] = (uint8_t)value;
  return to;
}
static void copy(uint64_t to, uint64_t from, uint64_t n) {
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n)::"memory");
}
static void write_register(uint32_t number, uint64_t value) {
  __asm__ volatile("wrmsr" ::"c"(number), "a"((uint32_t)value), "d"((uint32_t)(value >> 32)));
}

enum { kWrite = 1, kMmap = 9, kMprotect = 10, kMunmap = 11, kBrk = 12, kSigaction = 13,
       kSigprocmask = 14, kWritev = 20, kGetpid = 39, kExit = 60, kArchPrctl = 158, kGettid = 186,
       kTkill = 200, kFutex = 202, kSetTid = 218, kExitGroup = 231, kTgkill = 234, kSetRobust = 273,
       kGetrandom = 318 };

// arguments: r9, r8, r10, rdx, rsi, rdi.
int64_t handle_syscall(uint64_t number, const uint64_t* arguments) {
  const uint64_t a = arguments[5], b = arguments[4], c = arguments[3];
  switch (number) {
    case kWrite:
      print((const char*)b, c);
      return (int64_t)c;
    case kWritev: {
      int64_t all = 0;
      for (uint64_t i = 0; i < c; i++) {
        const uint64_t* piece = (const uint64_t*)b + 2 * i;
        print((const char*)piece[0], piece[1]);
        all += (int64_t)piece[1];
      }
      return all;
    }
    case kBrk:
      if (a >= heap && a <= kHeapEnd) heap = a;
      return (int64_t)heap;
    case kMmap: {
      const uint64_t at = mapped, size = (b + 4095) & ~4095ull;
      if (at + size > kMapEnd) return -12;
      mapped += size;
      memset((void*)at, 0, size);
      return (int64_t)at;
    }
    case kArchPrctl:
      if (a == 0x1002) {  // ARCH_SET_FS
        write_register(0xc0000100, b);
        return 0;
      }
      return a == 0x1023 ? 0 : -22;  // permission to use tiles is granted
    case kFutex:
      return (b & 127) == 0 ? -11 : 0;  // there is one thread: nobody to wait for, or to wake
    case kExit:
    case kExitGroup:
      end(a);
      return 0;
    case kTkill:
    case kTgkill:
      end(134);
      return 0;
    case kGetpid:
    case kGettid:
    case kSetTid:
      return 1;
    case kGetrandom:
      memset((void*)a, 42, b);
      return (int64_t)b;
    case kMprotect:
    case kMunmap:
    case kSigaction:
    case kSigprocmask:
    case kSetRobust:
      return 0;
    default:
      return -38;  // ENOSYS
  }
}

static void push(uint64_t** at, uint64_t value) { *--*at = value; }

// `information`: Multiboot's; its first module is the program, the module's text its arguments.
void main64(uint64_t information) {
  const uint32_t* module = (const uint32_t*)(uint64_t)((const uint32_t*)information)[6];
  const uint64_t file = module[0];
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)file;
  const Elf64_Phdr* parts = (const Elf64_Phdr*)(file + header->e_phoff);
  uint64_t headers = 0;
  for (int i = 0; i < header->e_phnum; i++) {
    if (parts[i].p_type != PT_LOAD) continue;
    const uint64_t to = parts[i].p_vaddr;
    copy(to, file + parts[i].p_offset, parts[i].p_filesz);
    memset((void*)(to + parts[i].p_filesz), 0, parts[i].p_memsz - parts[i].p_filesz);
    if (parts[i].p_offset == 0) headers = to + header->e_phoff;
    if (to + parts[i].p_memsz > heap) heap = to + parts[i].p_memsz;
  }
  heap = (heap + 4095) & ~4095ull;
  out(kSerial + 3, 0x83);  // 8 bits, and access to the divisor: 115,200 baud
  out(kSerial, 1);
  out(kSerial + 1, 0);
  out(kSerial + 3, 0x03);
  write_register(0xc0000081, 24ull << 32);  // STAR: code segment 24, stack 32
  write_register(0xc0000082, (uint64_t)syscall_entry);
  write_register(0xc0000084, 0x700);

  char* words[32];
  uint64_t count = 0;
  for (char* c = (char*)(uint64_t)module[2]; *c && count < 32;) {
    while (*c == ' ') *c++ = 0;
    if (*c) words[count++] = c;
    while (*c && *c != ' ') c++;
  }
  const uint64_t vector[][2] = {{AT_NULL, 0},
                                {AT_RANDOM, kStackTop},
                                {AT_PAGESZ, 4096},
                                {AT_PHNUM, header->e_phnum},
                                {AT_PHENT, sizeof(Elf64_Phdr)},
                                {AT_PHDR, headers}};
  uint64_t* stack = (uint64_t*)kStackTop;
  if ((count + 1) % 2) push(&stack, 0);  // rsp is a multiple of 16 at the entry
  for (size_t i = 0; i < sizeof vector / sizeof *vector; i++) {
    push(&stack, vector[i][1]);
    push(&stack, vector[i][0]);
  }
  push(&stack, 0);  // environment
  push(&stack, 0);  // arguments
  for (uint64_t i = count; i > 0; i--) push(&stack, (uint64_t)words[i - 1]);
  push(&stack, count);
  enter(header->e_entry, (uint64_t)stack);
}
