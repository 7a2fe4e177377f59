// Values of seqstarts, kvstarts and the index, checked as the reference does and in its words.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/attend_args.h"

namespace kvloom {

inline int64_t entry(const void* data, bool is_64, int64_t i) {
  return is_64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

inline int64_t entry(const IndexArray& array, int64_t i) {
  return entry(array.data, array.is_64, i * array.stride);
}

/// Refuses starts that do not begin with 0 or that decrease.
inline void check_starts(const char* name, const IndexArray& starts, int64_t count) {
  bool fits = entry(starts, 0) == 0;
  for (int64_t b = 1; b < count; ++b) fits = fits && entry(starts, b - 1) <= entry(starts, b);
  if (fits) return;
  std::string all;
  for (int64_t b = 0; b < count; ++b) all += (b ? ", " : "") + std::to_string(entry(starts, b));
  throw std::invalid_argument(std::string(name) + " must begin with 0 and never decrease, got [" + all + "]");
}

/// The table's extent: pages of a row, or entries of all ragged rows.
class IndexCheck {
 public:
  IndexCheck(const AttendArgs& args, int64_t width, int64_t num_slots)
      : args_(args), table_(args.table), width_(width), num_slots_(num_slots) {}

  /// Refuses rows with too few pages, then tokens whose slots are outside the cache.
  void run() const { table_.row_starts.data ? check_ragged() : check_pages(); }

 private:
  int64_t length(int64_t b) const { return entry(args_.kvstarts, b + 1) - entry(args_.kvstarts, b); }

  int64_t num_pages(int64_t b) const {
    return length(b) / table_.page_size + (length(b) % table_.page_size != 0);
  }

  int64_t first_slot(int64_t row, int64_t page) const {
    return entry(table_.entries, table_.entries_are_64, row + page * table_.entry_stride);
  }

  void check_pages() const {
    int64_t most = 0;
    for (int64_t b = 1; b < args_.num_sequences; ++b) most = num_pages(b) > num_pages(most) ? b : most;
    if (args_.num_sequences > 0 && num_pages(most) > width_) {
      throw std::invalid_argument("index must have " + std::to_string(num_pages(most)) + " pages of " +
                                  std::to_string(table_.page_size) + " for the " +
                                  std::to_string(length(most)) + " tokens of sequence " +
                                  std::to_string(most) + ", got " + std::to_string(width_));
    }
    for (int64_t b = 0; b < args_.num_sequences; ++b) {
      const int64_t row = b * table_.row_stride;
      int64_t left = length(b);
      for (int64_t page = 0; left > 0; ++page, left -= table_.page_size) {
        const int64_t held = left < table_.page_size ? left : table_.page_size;
        const int64_t first = first_slot(row, page);
        if (first >= 0 && first <= num_slots_ - held) continue;
        throw std::invalid_argument("index must be in [0, " + std::to_string(num_slots_) +
                                    ") for every token, got first slot " + std::to_string(first) +
                                    " for the " + std::to_string(held) + " tokens of page " +
                                    std::to_string(page) + " of sequence " + std::to_string(b));
      }
    }
  }

  void check_ragged() const {
    for (int64_t b = 0; b < args_.num_sequences; ++b) {
      const int64_t start = entry(table_.row_starts, b), count = length(b);
      if (count == 0 || (start >= 0 && start <= width_ - count)) continue;
      throw std::invalid_argument("index must hold row " + std::to_string(b) + " of " +
                                  std::to_string(count) + " entries from " + std::to_string(start) +
                                  " on, got " + std::to_string(width_) + " entries");
    }
    int64_t token = 0;
    for (int64_t b = 0; b < args_.num_sequences; ++b) {
      const int64_t row = entry(table_.row_starts, b) * table_.entry_stride, count = length(b);
      for (int64_t t = 0, page = 0, within = 0; t < count; ++t, ++token) {
        int64_t slot = 0;
        const bool wraps = __builtin_add_overflow(first_slot(row, page), within, &slot);
        if (wraps || slot < 0 || slot >= num_slots_) {
          throw std::invalid_argument("index must be in [0, " + std::to_string(num_slots_) + "), got " +
                                      std::to_string(slot) + " for token " + std::to_string(token));
        }
        if (++within == table_.page_size) within = 0, ++page;
      }
    }
  }

  const AttendArgs& args_;
  const PageTable& table_;
  const int64_t width_, num_slots_;
};

}  // namespace kvloom
