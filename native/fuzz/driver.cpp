// Runs the fuzz target where there is no libFuzzer: changes inputs at random for a while, beginning with streams of
// real sessions, and keeps those that reach code that nothing reached before. It is compiled without sanitizers itself.
//
//   driver [--seconds 60] [--seed 1] [--into FOLDER]    writes an input that fails to FOLDER/crash-...
//   driver FILE...                                      runs these inputs
//   driver --corpus FOLDER                              writes the inputs that it begins with, for libFuzzer

#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "session.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace {

using gradwire::Bytes;
using gradwire::Session;

constexpr size_t MOST_BYTES = 4096;
constexpr int LONGEST_RUN = 10;  // seconds

// -- what the code reaches: the compiler has it call this at every branch (-fsanitize-coverage=trace-pc)

uint8_t reached[1 << 16];  // by a run
uint8_t known[1 << 16];    // by any run before

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  auto address = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& count = reached[(address ^ address >> 16) & 0xFFFF];
  if (count < 255) count++;
}

namespace {

// Whether the run reached something new: a place, or one about twice as often as before.
bool is_new() {
  bool found = false;
  for (size_t i = 0; i < std::size(reached); i++) {
    if (!reached[i]) continue;
    uint8_t class_of_count = reached[i] < 4 ? 1 << (reached[i] - 1) : reached[i] < 16 ? 8 : reached[i] < 128 ? 16 : 32;
    found |= !(known[i] & class_of_count);
    known[i] |= class_of_count;
    reached[i] = 0;
  }
  return found;
}

// -- failures

std::string current;
std::string folder = ".";

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void save_current() {
  static bool is_saved = false;
  if (std::exchange(is_saved, true)) return;
  std::string path = folder + "/crash-" + std::to_string(std::hash<std::string>()(current));
  write_file(path, current);
  std::fprintf(stderr, "the input is in %s\n", path.c_str());
}

void on_signal(int signal) {
  std::fprintf(stderr, signal == SIGALRM ? "a run takes more than %d seconds\n" : "aborted\n", LONGEST_RUN);
  save_current();
  _exit(1);
}

void run(const std::string& input) {
  current = input;
  itimerval timer{.it_interval = {}, .it_value = {.tv_sec = LONGEST_RUN, .tv_usec = 0}};
  setitimer(ITIMER_REAL, &timer, nullptr);
  // A copy of just that size, so that the sanitizer sees reads beyond it.
  std::vector<uint8_t> exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

// -- inputs to begin with

// What one of two sessions writes while they call each other, with the options of a run before it.
std::string real_stream(std::mt19937_64& random) {
  gradwire::Settings settings;
  settings.chunk_bytes = 500;
  settings.refusal = "\x40\x01";
  Session sessions[2] = {Session(settings), Session(settings)};
  for (Session& session : sessions) session.attach(0);
  std::string streams[2];
  std::vector<gradwire::CallHandle> handles;
  static const std::string memory(70000, 'm');
  for (int step = 0; step < 30; step++) {
    int from = static_cast<int>(random() % 2);
    Session& session = sessions[from];
    size_t size = std::vector<size_t>{0, 5, 300, 66000}[random() % 16 == 0 ? 3 : random() % 3];
    gradwire::Attachment part{reinterpret_cast<const uint8_t*>(memory.data()), size, nullptr};
    std::vector<gradwire::Attachment> parts(random() % 3, part);
    gradwire::Session::CallOptions options;
    if (random() % 2) options.timeout = 5;
    switch (random() % 5) {
      case 0: handles.push_back(session.call(0, 1, "body", parts, options)); break;
      case 1: if (!handles.empty() && random() % 2) session.withdraw(0, handles[random() % handles.size()]); break;
      case 2: session.respond(1 + random() % 4, "answer", parts); break;
      case 3: session.fail(1 + random() % 4, "\x12\x01x"); break;
      default: break;
    }
    gradwire::Output output = session.take_output();
    for (const auto& piece : output.pieces) {
      Bytes bytes{piece.data, piece.size};
      streams[from].append(reinterpret_cast<const char*>(piece.data), piece.size);
      sessions[1 - from].receive(0, bytes);
    }
  }
  if (random() % 2) {
    sessions[0].close({.error = "error", .has_error = true, .leaving = true});
    for (const auto& piece : sessions[0].take_output().pieces)
      streams[0].append(reinterpret_cast<const char*>(piece.data), piece.size);
  }
  std::string options{'\0', static_cast<char>(random()), static_cast<char>(random()), static_cast<char>(random())};
  return options + streams[random() % 2].substr(0, MOST_BYTES - options.size());
}

// Steps of two sessions: a call or so, and bytes that move.
std::string steps(std::mt19937_64& random) {
  std::string input{'\1', static_cast<char>(random())};
  for (int i = 0; i < 200; i++) input.push_back(static_cast<char>(random()));
  return input;
}

std::vector<std::string> first_inputs(std::mt19937_64& random) {
  std::vector<std::string> inputs;
  for (int i = 0; i < 60; i++) inputs.push_back(real_stream(random)), inputs.push_back(steps(random));
  return inputs;
}

// -- changes

std::string changed(std::string input, const std::vector<std::string>& inputs, std::mt19937_64& random) {
  static const uint8_t telling[] = {0, 1, 2, 8, 10, 13, 18, 26, 34, 50, 58, 66, 106, 127, 128, 254, 255};
  for (uint64_t changes = 1 + random() % 8; changes > 0; changes--) {
    size_t at = input.empty() ? 0 : random() % input.size();
    size_t size = std::min<size_t>(input.size() - at, 1 + random() % (random() % 4 ? 8 : 200));
    switch (random() % 7) {
      case 0: if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << random() % 8)); break;
      case 1: if (!input.empty()) input[at] = static_cast<char>(telling[random() % std::size(telling)]); break;
      case 2: if (!input.empty()) input[at] = static_cast<char>(random()); break;
      case 3: input.erase(at, size); break;
      case 4: input.insert(random() % (input.size() + 1), input.substr(at, size)); break;
      case 5: input.insert(at, 1, static_cast<char>(random())); break;
      case 6: {
        const std::string& other = inputs[random() % inputs.size()];
        size_t begin = other.empty() ? 0 : random() % other.size();
        input.insert(at, other.substr(begin, 1 + random() % 64));
        break;
      }
    }
  }
  input.resize(std::min(input.size(), MOST_BYTES));
  return input;
}

}  // namespace

int main(int count, char** arguments) {
  uint64_t seconds = 60, seed = 1;
  std::string corpus;
  std::vector<std::string> files;
  for (int i = 1; i < count; i++) {
    std::string argument = arguments[i];
    if (!argument.starts_with("--")) {
      files.push_back(argument);
      continue;
    }
    std::string value = ++i < count ? arguments[i] : "";
    if (argument == "--seconds") seconds = std::stoull(value);
    else if (argument == "--seed") seed = std::stoull(value);
    else if (argument == "--into") folder = value;
    else if (argument == "--corpus") corpus = value;
    else return std::fprintf(stderr, "no such option: %s\n", argument.c_str()), 2;
  }
  std::mt19937_64 random(seed);
  std::vector<std::string> inputs = first_inputs(random);
  if (!corpus.empty()) {
    for (size_t i = 0; i < inputs.size(); i++) write_file(corpus + "/" + std::to_string(i), inputs[i]);
    return 0;
  }
  __sanitizer_set_death_callback(save_current);
  for (int signal : {SIGABRT, SIGALRM}) std::signal(signal, on_signal);
  for (const std::string& name : files) {
    std::ifstream file(name, std::ios::binary);
    run(std::string(std::istreambuf_iterator<char>(file), {}));
  }
  if (!files.empty()) return 0;

  using Clock = std::chrono::steady_clock;
  auto end = Clock::now() + std::chrono::seconds(seconds);
  uint64_t runs = 0;
  for (const std::string& input : inputs) run(input), runs++, is_new();
  while (Clock::now() < end) {
    // The latest ones reached something that the others do not.
    size_t size = inputs.size();
    size_t which = random() % 2 ? size - 1 - random() % std::min<size_t>(size, 50) : random() % size;
    std::string input = changed(inputs[which], inputs, random);
    run(input);
    runs++;
    if (is_new()) inputs.push_back(std::move(input));
  }
  itimerval never{};
  setitimer(ITIMER_REAL, &never, nullptr);
  std::printf("seed %llu: %llu runs, %zu inputs that each reach something of their own; nothing found\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(runs), inputs.size());
}
