// Runs one static Linux program in ring 0 of two emulated CPUs, without an operating system: loads
// the ELF file that the boot loader brought as a module, and answers the few system calls that a
// C++ program makes which only computes and prints. Output goes to the serial port; "exit N" is its
// last line, with the exit code, and ends the emulator.
#include <elf.h>
#include <stddef.h>
#include <stdint.h>

void enter(uint64_t entry, uint64_t stack);
void resume(uint64_t address, uint64_t stack);
void syscall_entry_0(void);
void syscall_entry_1(void);
extern const uint8_t trampoline[], trampoline_end[];

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
       kSigprocmask = 14, kWritev = 20, kSchedYield = 24, kMadvise = 28, kGetpid = 39, kClone = 56,
       kExit = 60, kArchPrctl = 158, kGettid = 186,
       kTkill = 200, kFutex = 202, kSetTid = 218, kExitGroup = 231, kTgkill = 234, kSetRobust = 273,
       kGetrandom = 318 };

// The second thread, which the other CPU runs. It may be another one after it has ended, but there is
// only one at a time.
enum { kOff, kIdle, kRunning };
static struct {
  volatile int state;
  uint64_t address, stack, local;  // where clone() returns; FS
  volatile int32_t* ended;         // becomes 0 when the thread ends
} second;
enum { kSecondId = 2, kTrampoline = 0x8000 };
enum { kSetParent = 0x100000, kClearChild = 0x200000, kSetChild = 0x1000000 };  // flags of clone

static void set_up_syscalls(void (*entry)(void)) {
  write_register(0xc0000081, 24ull << 32);  // STAR: code segment 24, stack 32
  write_register(0xc0000082, (uint64_t)entry);
  write_register(0xc0000084, 0x700);
}

static void wait_a_little(void) {
  for (int i = 0; i < 20000; i++) __asm__ volatile("pause");
}

// Sends the other CPU an INIT and a start-up message through the interrupt controller.
static void start_other_cpu(void) {
  volatile uint32_t* controller = (volatile uint32_t*)0xfee00000;
  copy(kTrampoline, (uint64_t)trampoline, (uint64_t)(trampoline_end - trampoline));
  controller[0xf0 / 4] |= 0x100;  // enabled
  const uint32_t messages[] = {0x4500, 0x4600 | kTrampoline >> 12};
  for (int i = 0; i < 2; i++) {
    controller[0x310 / 4] = 1u << 24;  // CPU 1
    controller[0x300 / 4] = messages[i];
    wait_a_little();
  }
}

static void run_second(void) {
  while (second.state != kRunning) __asm__ volatile("pause");
  write_register(0xc0000100, second.local);
  resume(second.address, second.stack);
}

// Where the other CPU begins.
void other_main(void) {
  set_up_syscalls(syscall_entry_1);
  run_second();
}

static int64_t clone(uint64_t flags, uint64_t stack, int32_t* parent, int32_t* child,
                     uint64_t local, uint64_t address) {
  static int32_t nobody;
  if (second.state == kRunning) return -11;  // EAGAIN: there are two CPUs
  second.address = address;
  second.stack = stack;
  second.local = local;
  second.ended = flags & kClearChild ? child : &nobody;
  if (flags & kSetParent) *parent = kSecondId;
  if (flags & kSetChild) *child = kSecondId;
  const int first = second.state == kOff;
  second.state = kRunning;
  if (first) start_other_cpu();
  return kSecondId;
}

static volatile int busy;
static void lock(void) {
  while (__sync_lock_test_and_set(&busy, 1)) __asm__ volatile("pause");
}
static void unlock(void) { __sync_lock_release(&busy); }

static int64_t answer(uint64_t number, const uint64_t* arguments, int cpu);

// arguments: r9, r8, r10, rdx, rsi, rdi, then the flags and where the program continues.
int64_t handle_syscall(uint64_t number, const uint64_t* arguments, int cpu) {
  if (number == kExit && cpu == 1) {
    *second.ended = 0;
    second.state = kIdle;
    run_second();
  }
  lock();
  const int64_t result = answer(number, arguments, cpu);
  unlock();
  return result;
}

static int64_t answer(uint64_t number, const uint64_t* arguments, int cpu) {
  const uint64_t a = arguments[5], b = arguments[4], c = arguments[3];
  switch (number) {
    case kClone:
      return clone(a, b, (int32_t*)c, (int32_t*)arguments[2], arguments[1], arguments[7]);
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
      return (b & 127) == 0 ? -11 : 0;  // threads wait by asking again
    case kExit:
    case kExitGroup:
      end(a);
      return 0;
    case kTkill:
    case kTgkill:
      end(134);
      return 0;
    case kGettid:
      return cpu == 1 ? kSecondId : 1;
    case kGetpid:
    case kSetTid:
      return 1;
    case kGetrandom:
      memset((void*)a, 42, b);
      return (int64_t)b;
    case kMprotect:
    case kSchedYield:
    case kMadvise:
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
  set_up_syscalls(syscall_entry_0);

  static char text[4096];  // a copy: the trampoline may lie where the boot loader has put it
  const char* given = (const char*)(uint64_t)module[2];
  for (size_t i = 0; i + 1 < sizeof text && given[i]; i++) text[i] = given[i];
  char* words[32];
  uint64_t count = 0;
  for (char* c = text; *c && count < 32;) {
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
  if (count % 2) push(&stack, 0);  // rsp is a multiple of 16 at the entry
  for (size_t i = 0; i < sizeof vector / sizeof *vector; i++) {
    push(&stack, vector[i][1]);
    push(&stack, vector[i][0]);
  }
  push(&stack, 0);  // environment: one arena, because every further one maps 128 MB
  push(&stack, (uint64_t)"GLIBC_TUNABLES=glibc.malloc.arena_max=1");
  push(&stack, 0);  // arguments
  for (uint64_t i = count; i > 0; i--) push(&stack, (uint64_t)words[i - 1]);
  push(&stack, count);
  enter(header->e_entry, (uint64_t)stack);
}
