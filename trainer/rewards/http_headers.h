// HttpHeaders: what an HTTP reward sends beside its body, and how its secrets stay out of everything else.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// "Name: value" each. In a value {env:NAME} and {file:PATH} stand for a variable of the environment and for what a file
// holds (without the blanks around it): the secrets. Files are read whenever values() is called, since tokens are
// renewed. Not thread-safe.
class HttpHeaders final {
 public:
  // `environment`: the variables that are asked for; this folder does not read the process's. Throws Error(kUser) that
  // names the header, and the variable that is missing.
  HttpHeaders(const std::vector<std::string>& lines, const std::map<std::string, std::string>& environment);

  // Throws Error(kIo) that names header and file; no message holds a value.
  std::vector<std::pair<std::string, std::string>> values();
  // The text with every secret that was read in place of "***": a server may repeat what it was sent.
  std::string redact(std::string text) const;

 private:
  struct Piece {
    enum class Kind { kText, kVariable, kFile } kind = Kind::kText;
    std::string text;  // the text itself, the variable's value, the file's path
  };
  struct Header {
    std::string name;
    std::vector<Piece> pieces;
  };
  std::vector<Header> headers_;
  std::vector<std::string> secrets_;  // as they were last
};

// The variables that such lines ask for.
std::vector<std::string> environment_of_headers(const std::vector<std::string>& lines);

}  // namespace trireme
