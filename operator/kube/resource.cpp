#include "operator/kube/resource.h"

#include "base/error.h"

namespace trireme::kube {

std::string Resource::group_path() const {
  return group.empty() ? "/api/" + version : "/apis/" + group + "/" + version;
}

std::string Resource::path(std::string_view ns, std::string_view name, std::string_view subresource) const {
  std::string out = group_path();
  if (namespaced) {
    if (!ns.empty()) {
      out += "/namespaces/" + url_encode(ns);
    } else if (!name.empty()) {
      fail_internal(kind + " '" + std::string(name) + "' was addressed without a namespace");
    }
  }
  out += "/" + plural;
  if (!name.empty()) out += "/" + url_encode(name);
  if (!subresource.empty()) out += "/" + std::string(subresource);
  return out;
}

Resource resource_of(const std::string& group_version, const std::string& plural, const std::string& kind) {
  const size_t slash = group_version.find('/');
  Resource resource;
  resource.group = slash == std::string::npos ? "" : group_version.substr(0, slash);
  resource.version = slash == std::string::npos ? group_version : group_version.substr(slash + 1);
  resource.plural = plural;
  resource.kind = kind;
  return resource;
}

ObjectKey ObjectKey::parse(std::string_view text) {
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos) return {"", std::string(text)};
  return {std::string(text.substr(0, slash)), std::string(text.substr(slash + 1))};
}

std::string url_encode(std::string_view text) {
  static const char* const kHex = "0123456789ABCDEF";
  std::string out;
  out.reserve(text.size());
  for (const unsigned char c : text) {
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
        c == '.' || c == '~') {
      out += static_cast<char>(c);
    } else {
      out += '%';
      out += kHex[c >> 4];
      out += kHex[c & 15];
    }
  }
  return out;
}

}  // namespace trireme::kube
