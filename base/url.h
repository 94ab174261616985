// http(s) URLs, split into what a client connects to and what it asks for there.
#pragma once

#include <string>
#include <string_view>

namespace trireme {

struct Url {
  std::string scheme;     // "http"; empty when there is no "://"
  std::string authority;  // [user@]host[:port], not looked into
  std::string path;       // from the first '/' or '?' on, query included; may be empty

  std::string origin() const { return scheme.empty() ? authority : scheme + "://" + authority; }
  bool is_http() const { return (scheme == "http" || scheme == "https") && !authority.empty(); }
  bool names_user() const { return authority.find('@') != std::string::npos; }
};

// Any text has parts; whether they are a URL one can use is the caller's to ask.
Url split_url(std::string_view text);

}  // namespace trireme
