// Answers tokenizer requests for tokenizer_parity.py: a model folder as argument, one JSON object a line on stdin
// ({"encode", "add_special"} | {"decode", "skip_special"} | {"chat", "add_generation_prompt", "extra"}), one on stdout.
#include <iostream>

#include "base/error.h"
#include "trainer/tokenizer/tokenizer.h"

int main(int argc, char** argv) {
  using nlohmann::ordered_json;
  if (argc == 3 && std::string(argv[1]) == "--make-byte-tokenizer") {
    trireme::make_byte_tokenizer(argv[2]);
    return 0;
  }
  if (argc != 2) return 2;
  const auto tokenizer = trireme::Tokenizer::load(argv[1]);
  std::string line;
  while (std::getline(std::cin, line)) {
    const ordered_json request = ordered_json::parse(line);
    ordered_json reply;
    try {
      if (request.contains("encode")) {
        reply["ids"] = tokenizer->encode(request["encode"].get<std::string>(), request.value("add_special", false));
      } else if (request.contains("decode")) {
        reply["text"] =
            tokenizer->decode(request["decode"].get<std::vector<int32_t>>(), request.value("skip_special", true));
      } else {
        reply["text"] =
            tokenizer->render_chat_ordered(request["chat"], request["add_generation_prompt"], request["extra"]);
      }
    } catch (const trireme::Error& e) {
      reply["error"] = e.what();
    }
    std::cout << reply.dump() << "\n";
  }
  return 0;
}
