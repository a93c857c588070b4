#include "base/status.h"

#include <cerrno>
#include <system_error>

namespace jaxfabric {

std::string_view CodeName(Code code) {
  static constexpr std::string_view kNames[] = {"OK",
                                                "CANCELLED",
                                                "UNKNOWN",
                                                "INVALID_ARGUMENT",
                                                "DEADLINE_EXCEEDED",
                                                "NOT_FOUND",
                                                "ALREADY_EXISTS",
                                                "PERMISSION_DENIED",
                                                "RESOURCE_EXHAUSTED",
                                                "FAILED_PRECONDITION",
                                                "ABORTED",
                                                "OUT_OF_RANGE",
                                                "UNIMPLEMENTED",
                                                "INTERNAL",
                                                "UNAVAILABLE",
                                                "DATA_LOSS",
                                                "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
}

std::string Status::ToString() const {
  return ok() ? "OK" : StrCat(CodeName(code()), ": ", message());
}

Status Status::WithContext(std::string_view context) const {
  return ok() ? Status() : Status(code(), StrCat(context, ": ", message()));
}

Status ErrnoStatus(std::string_view what, int error_number) {
  Code code = Code::kInternal;
  switch (error_number) {
    case EPERM:
    case EACCES:
      code = Code::kPermissionDenied;
      break;
    case ENOENT:
      code = Code::kNotFound;
      break;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOSPC:
    case ENOBUFS:
      code = Code::kResourceExhausted;
      break;
    case ESRCH:
    case EPIPE:
    case ECONNRESET:
    case ECONNREFUSED:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
    case EHOSTDOWN:
    case ECONNABORTED:
      code = Code::kUnavailable;
      break;
    case ETIMEDOUT:
      code = Code::kDeadlineExceeded;
      break;
    default:
      break;
  }
  const auto remedy = error_number == EMFILE ? " (ulimit -n raises the limit)" : "";
  return Status(code, StrCat(what, ": ", std::generic_category().message(error_number), remedy));
}

}  // namespace jaxfabric
