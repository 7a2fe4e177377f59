// Symbols of newer libraries than manylinux_2_28 has (glibc 2.28, libstdc++ of GCC 8), which our sources or
// torch's headers ask for when they are compiled beside newer ones. The linker takes these instead.
#include <sstream>

#ifdef __GLIBC__

// glibc 2.29 has exp and log that call no handler of errors; those before have the same results.
#if defined(__x86_64__)
#define KVLOOM_BEFORE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define KVLOOM_BEFORE "GLIBC_2.17"
#endif
#ifdef KVLOOM_BEFORE
extern "C" {
double kvloom_exp_before(double x);
double kvloom_log_before(double x);
__asm__(".symver kvloom_exp_before, exp@" KVLOOM_BEFORE);
__asm__(".symver kvloom_log_before, log@" KVLOOM_BEFORE);
__attribute__((visibility("hidden"))) double kvloom_exp(double x) __asm__("exp");
__attribute__((visibility("hidden"))) double kvloom_log(double x) __asm__("log");
double kvloom_exp(double x) { return kvloom_exp_before(x); }
double kvloom_log(double x) { return kvloom_log_before(x); }
}
#endif

// glibc 2.32: whether counts of references need no atomic instructions. They work either way.
extern "C" {
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}

// libstdc++ of GCC 9 and GCC 11: members of templates, compiled here as if no library had them.
#if defined(__GLIBCXX__) && _GLIBCXX_USE_CXX11_ABI
template std::stringstream::basic_stringstream();
template std::ostringstream::basic_ostringstream();
#if _GLIBCXX_RELEASE >= 11
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;
#endif
#endif

#endif
