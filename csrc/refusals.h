// Errors of the library: sentences that name one of Python's errors.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace kvloom {

[[noreturn]] inline void refuse(const char* error, const std::string& sentence) {
  throw std::out_of_range(std::string("kvloom.errors.") + error + ": " + sentence);
}

// An operator as torch calls it. Which exception of C++ becomes which of Python's differs between versions of
// torch; all of them keep the text, and make an IndexError of `std::out_of_range`. `refused` in
// ops/impl/cpu.py reads the text.
template <void (*boxed)(StableIValue*, uint64_t, uint64_t)>
void refusing(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  try {
    boxed(stack, num_inputs, num_outputs);
  } catch (const std::invalid_argument& error) {
    refuse("ArgumentError", error.what());
  } catch (const std::out_of_range& error) {
    refuse("ShapeError", error.what());
  } catch (const std::bad_alloc&) {
    refuse("OutOfMemory", "what the kernel allocates must fit memory");
  }
}

}  // namespace kvloom

// In place of TORCH_BOX.
#define KVLOOM_BOX(function) (&kvloom::refusing<&TORCH_BOX(function)>)
