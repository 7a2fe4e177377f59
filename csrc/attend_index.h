// The index of a call: seqstarts, kvstarts and the page table, copied once, then checked as the reference
// does and with its messages. Another thread that writes to the tensors in the meantime changes nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/attend/args.h"
#include "tensors.h"

namespace kvloom {

class AttendIndex {
 public:
  // Copies and checks the starts of new and of stored tokens.
  AttendIndex(const Tensor& seqstarts, const Tensor& kvstarts, const MaybeTensor& first_visible,
              int64_t num_rows) {
    const Integers rows = integers_of(seqstarts, 1, "seqstarts must be integers, [B + 1]");
    const Integers stored = integers_of(kvstarts, 1, "kvstarts must be integers, [B + 1]");
    num_sequences_ = seqstarts.size(0) - 1;
    require(num_sequences_ >= 0 && kvstarts.size(0) == seqstarts.size(0), "kvstarts must be as seqstarts");
    seqstarts_ = rows.copied(num_sequences_ + 1);
    kvstarts_ = stored.copied(num_sequences_ + 1);
    if (first_visible) {
      const Integers first = integers_of(*first_visible, 1, "first_visible must be integers, [B]");
      require(first_visible->size(0) == num_sequences_, "first_visible must have an entry for each sequence");
      first_visible_ = first.copied(num_sequences_);
      has_first_visible_ = true;
    }
    check_starts("seqstarts", seqstarts_);
    check_starts("kvstarts", kvstarts_);
    if (seqstarts_.back() != num_rows) {
      throw std::invalid_argument("seqstarts must end with the " + std::to_string(num_rows) +
                                  " rows of query, got " + std::to_string(seqstarts_.back()));
    }
  }

  // Copies from where on each sequence leaves tokens out.
  void copy_skip_from(const MaybeTensor& skip_from) {
    if (!skip_from) return;
    const Integers from = integers_of(*skip_from, 1, "skip_from must be integers, [B]");
    require(skip_from->size(0) == num_sequences_, "skip_from must have an entry for each sequence");
    skip_from_ = from.copied(num_sequences_);
    has_skip_from_ = true;
  }

  int64_t num_columns() const { return kvstarts_.back(); }

  // Refuses sequences of more new tokens than stored ones where `has_positions(b)`: some would be negative.
  template <class HasPositions>
  void check_lengths(HasPositions has_positions) const {
    for (int64_t b = 0; b < num_sequences_; ++b) {
      const int64_t num_new = seqstarts_[b + 1] - seqstarts_[b];
      if (num_new <= length(b) || !has_positions(b)) continue;
      throw std::invalid_argument("kvstarts must give sequence " + std::to_string(b) + " at least its " +
                                  std::to_string(num_new) + " new tokens, got " + std::to_string(length(b)));
    }
  }

  // Copies the pages that are read, and refuses rows with too few, then tokens outside the cache.
  void copy_pages(const Tensor& table, const MaybeTensor& row_starts, int64_t page_size, int64_t num_slots) {
    const int64_t rank = row_starts ? 1 : 2;
    const Integers entries =
        integers_of(table, rank, "index must be integers, [B, P], or [N] with row_starts");
    require(page_size > 0, "page_size must be at least 1");
    require((row_starts ? *row_starts : table).size(0) >= num_sequences_,
            "index must have a row for each sequence");
    page_size_ = page_size;
    const int64_t width = table.size(rank - 1);
    row_starts ? copy_ragged(entries, integers_of(*row_starts, 1, "row_starts must be integers, [B]"), width,
                             num_slots)
               : copy_padded(entries, table.stride(0), width, num_slots);
  }

  // Points `args` at the copies, which live as long as this object.
  void assign_to(AttendArgs& args) const {
    args.num_sequences = num_sequences_;
    args.seqstarts = seqstarts_.data();
    args.kvstarts = kvstarts_.data();
    args.first_visible = has_first_visible_ ? first_visible_.data() : nullptr;
    args.skip_from = has_skip_from_ ? skip_from_.data() : nullptr;
    args.table = {pages_.data(), rows_.data(), page_size_};
  }

 private:
  // Refuses starts that do not begin with 0 or that decrease.
  static void check_starts(const char* name, const std::vector<int64_t>& starts) {
    if (starts[0] == 0 && std::is_sorted(starts.begin(), starts.end())) return;
    std::string all;
    for (const int64_t start : starts) all += (all.empty() ? "" : ", ") + std::to_string(start);
    throw std::invalid_argument(std::string(name) + " must begin with 0 and never decrease, got [" + all +
                                "]");
  }

  int64_t length(int64_t b) const { return kvstarts_[b + 1] - kvstarts_[b]; }
  int64_t num_pages(int64_t b) const { return length(b) / page_size_ + (length(b) % page_size_ != 0); }

  // Copies the pages of sequence b, of which the first is `first`.
  void copy_row(const Integers& entries, int64_t first, int64_t b) {
    rows_.push_back(static_cast<int64_t>(pages_.size()));
    const int64_t count = num_pages(b);
    for (int64_t page = 0; page < count; ++page) pages_.push_back(entries[first + page]);
  }

  void copy_padded(Integers entries, int64_t row_stride, int64_t width, int64_t num_slots) {
    int64_t most = 0;
    for (int64_t b = 1; b < num_sequences_; ++b) most = num_pages(b) > num_pages(most) ? b : most;
    if (num_sequences_ > 0 && num_pages(most) > width) {
      throw std::invalid_argument("index must have " + std::to_string(num_pages(most)) + " pages of " +
                                  std::to_string(page_size_) + " for the " + std::to_string(length(most)) +
                                  " tokens of sequence " + std::to_string(most) + ", got " +
                                  std::to_string(width));
    }
    const char* data = static_cast<const char*>(entries.data);
    for (int64_t b = 0; b < num_sequences_; ++b) {
      entries.data = data + b * row_stride * (entries.is_64 ? 8 : 4);
      copy_row(entries, 0, b);
      for (int64_t page = 0, left = length(b); left > 0; ++page, left -= page_size_) {
        const int64_t held = std::min(left, page_size_), first = pages_[rows_[b] + page];
        if (first >= 0 && first <= num_slots - held) continue;
        throw std::invalid_argument("index must be in [0, " + std::to_string(num_slots) +
                                    ") for every token, got first slot " + std::to_string(first) +
                                    " for the " + std::to_string(held) + " tokens of page " +
                                    std::to_string(page) + " of sequence " + std::to_string(b));
      }
    }
  }

  void copy_ragged(const Integers& entries, const Integers& row_starts, int64_t width, int64_t num_slots) {
    const std::vector<int64_t> starts = row_starts.copied(num_sequences_);
    for (int64_t b = 0; b < num_sequences_; ++b) {
      const int64_t count = length(b);
      if (count == 0 || (starts[b] >= 0 && starts[b] <= width - count)) continue;
      throw std::invalid_argument("index must hold row " + std::to_string(b) + " of " +
                                  std::to_string(count) + " entries from " + std::to_string(starts[b]) +
                                  " on, got " + std::to_string(width) + " entries");
    }
    int64_t token = 0;
    for (int64_t b = 0; b < num_sequences_; ++b) {
      copy_row(entries, starts[b], b);
      const int64_t count = length(b);
      for (int64_t t = 0, page = rows_[b], within = 0; t < count; ++t, ++token) {
        int64_t slot = 0;
        const bool wraps = __builtin_add_overflow(pages_[page], within, &slot);
        if (wraps || slot < 0 || slot >= num_slots) {
          throw std::invalid_argument("index must be in [0, " + std::to_string(num_slots) + "), got " +
                                      std::to_string(slot) + " for token " + std::to_string(token));
        }
        if (++within == page_size_) within = 0, ++page;
      }
    }
  }

  int64_t num_sequences_ = 0, page_size_ = 1;
  bool has_first_visible_ = false, has_skip_from_ = false;
  std::vector<int64_t> seqstarts_, kvstarts_, first_visible_, skip_from_, rows_, pages_;
};

}  // namespace kvloom
