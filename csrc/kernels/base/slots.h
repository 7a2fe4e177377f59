// In which slot each token is.
#pragma once

#include "types.h"

namespace kvloom {

// slot(b, t) = entries[rows[b] + t / page_size] + t % page_size.
struct PageTable {
  const Index* entries;
  const Index* rows;
  Index page_size;
};

// The stored tokens of one sequence, as runs of consecutive slots. By default token t is in slot t.
class TokenSlots {
 public:
  TokenSlots() = default;
  KVLOOM_INLINE explicit TokenSlots(const Index* slots) : entries_(slots), page_size_(1) {}
  KVLOOM_INLINE TokenSlots(const PageTable& table, Index sequence)
      : entries_(table.entries + table.rows[sequence]), page_size_(table.page_size) {}

  KVLOOM_INLINE Index page_size() const { return page_size_.size(); }

  KVLOOM_INLINE Index operator[](Index token) const {
    const Index page = page_size_.quotient(token);
    return entries_[page] + token - page * page_size_.size();
  }

  template <class Visit>  // Visit(token, slot, count)
  KVLOOM_INLINE void runs(Index token, Index count, Visit visit) const {
    Index page = page_size_.quotient(token), within = token - page * page_size_.size();
    while (count > 0) {
      const Index run = min(count, page_size_.size() - within);
      visit(token, entries_[page] + within, run);
      token += run;
      count -= run;
      within = 0;
      ++page;
    }
  }

 private:
  static constexpr Index kFirst = 0;
  const Index* entries_ = &kFirst;
  Divisor page_size_;
};

}  // namespace kvloom
