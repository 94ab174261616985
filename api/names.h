// Names as Kubernetes allows them, and how a message shows a user's text.
#pragma once

#include <string>
#include <string_view>

namespace trireme::names {

inline constexpr const char* kLowerAlnum = "abcdefghijklmnopqrstuvwxyz0123456789";
inline constexpr const char* kLowerLabel = "abcdefghijklmnopqrstuvwxyz0123456789-";
inline constexpr const char* kNameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";

// In quotes, cut behind 64 bytes.
std::string quoted(const std::string& text);
bool only(std::string_view text, std::string_view allowed);

// RFC 1035 label: what Services and host names need.
bool is_dns_label(std::string_view text);
bool is_dns_subdomain(std::string_view text);
// [prefix/]name, as of label keys and extended resources.
bool is_qualified_name(std::string_view text);
bool is_quantity(std::string_view text);
// What is wrong with the name of an image; empty: nothing.
std::string image_problem(const std::string& image);

}  // namespace trireme::names
