// Kernels and the attributes of their parameters, sections 5.1 and 5.2. Other functions may have the
// attributes, as in shipped Metal code; there they are ignored.
#include <llvm/ADT/StringMap.h>

#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

// Positions and sizes in the grid have one to three elements, the same number for all parameters of a kernel.
// Indices and counts are scalars.
enum class Width { kGrid, kScalar };
const llvm::StringMap<Width> kBuiltins = {
    {"thread_position_in_grid", Width::kGrid},
    {"threads_per_grid", Width::kGrid},
    {"thread_position_in_threadgroup", Width::kGrid},
    {"threads_per_threadgroup", Width::kGrid},
    {"dispatch_threads_per_threadgroup", Width::kGrid},
    {"threadgroup_position_in_grid", Width::kGrid},
    {"threadgroups_per_grid", Width::kGrid},
    {"grid_origin", Width::kGrid},
    {"grid_size", Width::kGrid},
    {"thread_index_in_threadgroup", Width::kScalar},
    {"thread_index_in_simdgroup", Width::kScalar},
    {"thread_index_in_quadgroup", Width::kScalar},
    {"simdgroup_index_in_threadgroup", Width::kScalar},
    {"quadgroup_index_in_threadgroup", Width::kScalar},
    {"simdgroups_per_threadgroup", Width::kScalar},
    {"quadgroups_per_threadgroup", Width::kScalar},
    {"dispatch_simdgroups_per_threadgroup", Width::kScalar},
    {"dispatch_quadgroups_per_threadgroup", Width::kScalar},
    {"threads_per_simdgroup", Width::kScalar},
    {"thread_execution_width", Width::kScalar},
};

// The name in `buffer(0)`.
StringRef name_of(StringRef attribute) {
  return attribute.take_until([](char c) { return c == '(' || c == ' '; });
}

bool is_kernel(const FunctionDecl* function) { return !annotations(function, "kernel").empty(); }

class Kernels : public Family {
 public:
  using Family::Family;

  void declaration(const Decl* declaration) override {
    const auto* function = dyn_cast<FunctionDecl>(declaration);
    if (function && is_kernel(function)) check_kernel(function);
  }

  void statement(const Stmt* statement) override {
    const auto* call = dyn_cast<CallExpr>(statement);
    const FunctionDecl* callee = call ? call->getDirectCallee() : nullptr;
    if (callee && is_kernel(callee))
      program.refuse(call->getBeginLoc(),
                     "'" + callee->getName() + "' is a kernel, which no function can call");
  }

 private:
  void check_kernel(const FunctionDecl* kernel) {
    const ParmVarDecl* first = nullptr;
    for (const ParmVarDecl* parameter : kernel->parameters()) {
      if (parameter->getType()->isDependentType()) continue;
      check_pointee(kernel, parameter);
      for (StringRef attribute : annotations(parameter, "attribute")) {
        const StringRef name = name_of(attribute);
        if (auto builtin = kBuiltins.find(name); builtin != kBuiltins.end()) {
          if (!check_builtin(kernel, parameter, name, builtin->second)) continue;
          if (builtin->second == Width::kGrid) {
            if (first && width(first) != width(parameter))
              program.refuse(parameter->getLocation(),
                             "'" + first->getName() + "' and '" + parameter->getName() + "' of kernel '" +
                                 kernel->getName() +
                                 "' must be both scalars, or both vectors of the same number of elements");
            if (!first) first = parameter;
          }
        } else if (name == "buffer") {
          const Space space = pointee_space(parameter);
          if (!parameter->getType()->getPointeeType().isNull() &&
              (space == Space::kThreadgroup || space == Space::kThread))
            program.refuse(parameter->getLocation(), subject(kernel, parameter) +
                                                         " has the attribute 'buffer', so it must point to "
                                                         "device or constant memory");
        } else if (name == "threadgroup") {
          if (pointee_space(parameter) != Space::kThreadgroup)
            program.refuse(parameter->getLocation(), subject(kernel, parameter) +
                                                         " has the attribute 'threadgroup', so it must point "
                                                         "to threadgroup memory");
        }
      }
    }
  }

  static std::string subject(const FunctionDecl* kernel, const ParmVarDecl* parameter) {
    return "parameter '" + parameter->getNameAsString() + "' of kernel '" + kernel->getNameAsString() + "'";
  }

  static Space pointee_space(const ParmVarDecl* parameter) {
    const QualType pointee = parameter->getType()->getPointeeType();
    return pointee.isNull() ? Space::kThread : space_of(pointee);
  }

  static unsigned width(const ParmVarDecl* parameter) {
    const auto* vector = parameter->getType()->getAs<VectorType>();
    return vector ? vector->getNumElements() : 1;
  }

  bool check_builtin(const FunctionDecl* kernel, const ParmVarDecl* parameter, StringRef name, Width kind) {
    const QualType type = parameter->getType();
    const auto* vector = type->getAs<VectorType>();
    const QualType element = vector ? vector->getElementType() : type;
    const bool is_element = element->isSpecificBuiltinType(BuiltinType::UShort) ||
                            element->isSpecificBuiltinType(BuiltinType::UInt);
    if (is_element && width(parameter) <= (kind == Width::kGrid ? 3 : 1)) return true;
    program.refuse(parameter->getLocation(),
                   subject(kernel, parameter) + " has the attribute '" + name +
                       "', so it must be uint or ushort" +
                       (kind == Width::kGrid ? ", or a vector of 2 or 3 of them" : "") + ", not '" +
                       spelled(program, type) + "'");
    return false;
  }

  // A buffer can hold pointers only in a struct.
  void check_pointee(const FunctionDecl* kernel, const ParmVarDecl* parameter) {
    QualType pointee = parameter->getType()->getPointeeType();
    if (pointee.isNull()) return;
    pointee = program.context.getBaseElementType(pointee);
    if (pointee->isPointerType() || pointee->isReferenceType())
      program.refuse(
          parameter->getLocation(),
          subject(kernel, parameter) + " is a pointer to a pointer: put the inner one into a struct");
  }
};

}  // namespace

std::unique_ptr<Family> kernels(Program& program) { return std::make_unique<Kernels>(program); }

}  // namespace softmetal::rules
