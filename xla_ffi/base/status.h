// Status and Result<T>: errors as values for everything below the Python module.
//
// The codes are those of XLA_FFI_Error_Code (which are absl's), so that the FFI layer converts with
// a cast. An OK status owns nothing: returning one on the data path neither allocates nor throws.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace jaxfabric {

enum class Code : int32_t {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// "DEADLINE_EXCEEDED" and so on.
std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : error_(std::make_unique<Error>(Error{code, std::move(message)})) {}
  Status(const Status& other)
      : error_(other.error_ ? std::make_unique<Error>(*other.error_) : nullptr) {}
  Status& operator=(const Status& other) {
    error_ = other.error_ ? std::make_unique<Error>(*other.error_) : nullptr;
    return *this;
  }
  Status(Status&&) = default;
  Status& operator=(Status&&) = default;

  bool ok() const { return error_ == nullptr; }
  Code code() const { return error_ ? error_->code : Code::kOk; }
  std::string_view message() const {
    return error_ ? std::string_view(error_->message) : std::string_view();
  }
  // "UNAVAILABLE: rank 3 died", or "OK".
  std::string ToString() const;
  // The same error with "context: " before its message; OK stays OK.
  Status WithContext(std::string_view context) const;

 private:
  struct Error {
    Code code;
    std::string message;
  };
  std::unique_ptr<Error> error_;
};

inline Status OkStatus() { return Status(); }

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit, as in absl::StatusOr
  Result(Status status) : value_(std::move(status)) {}  // NOLINT
  bool ok() const { return std::holds_alternative<T>(value_); }
  Status status() const { return ok() ? Status() : std::get<Status>(value_); }
  T& value() & { return std::get<T>(value_); }
  const T& value() const& { return std::get<T>(value_); }
  T&& value() && { return std::get<T>(std::move(value_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> value_;
};

// "what: strerror(error_number)" with a code that fits the errno.
Status ErrnoStatus(std::string_view what, int error_number);

// Builds a message from parts: StrCat("rank ", 3, " left").
namespace internal {
inline void Append(std::string& out, std::string_view part) { out.append(part); }
inline void Append(std::string& out, const char* part) { out.append(part); }
inline void Append(std::string& out, char part) { out.push_back(part); }
inline void Append(std::string& out, const std::string& part) { out.append(part); }
inline void Append(std::string& out, bool part) { out.append(part ? "true" : "false"); }
template <class N>
  requires std::is_arithmetic_v<N>
void Append(std::string& out, N part) {
  if constexpr (std::is_floating_point_v<N>) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", static_cast<double>(part));
    out.append(text);
  } else {
    out.append(std::to_string(part));
  }
}
}  // namespace internal

template <class... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (internal::Append(out, parts), ...);
  return out;
}

#define JF_CONCAT_INNER(a, b) a##b
#define JF_CONCAT(a, b) JF_CONCAT_INNER(a, b)

// Returns the status of `expression` from the enclosing function unless it is OK.
#define JF_RETURN_IF_ERROR(expression)                                                   \
  do {                                                                                   \
    if (::jaxfabric::Status jf_status = (expression); !jf_status.ok()) return jf_status; \
  } while (false)

// Assigns the value of a Result to `target`, or returns its status.
#define JF_ASSIGN_OR_RETURN(target, expression)                                               \
  auto JF_CONCAT(jf_result_, __LINE__) = (expression);                                        \
  if (!JF_CONCAT(jf_result_, __LINE__).ok()) return JF_CONCAT(jf_result_, __LINE__).status(); \
  target = std::move(JF_CONCAT(jf_result_, __LINE__)).value()

// A broken invariant of our own: says where and aborts. Never for bad input or a failed peer.
#define JF_CHECK(condition)                                                            \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "jaxfabric: %s:%d: check failed: %s\n", __FILE__, __LINE__, \
                   #condition);                                                        \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)

}  // namespace jaxfabric
