#include "base/url.h"

namespace trireme {

Url split_url(std::string_view text) {
  Url url;
  if (const size_t mark = text.find("://"); mark != std::string_view::npos) {
    url.scheme = text.substr(0, mark);
    text.remove_prefix(mark + 3);
  }
  const size_t end = text.find_first_of("/?");
  url.authority = text.substr(0, end);
  if (end != std::string_view::npos) url.path = text.substr(end);
  return url;
}

}  // namespace trireme
