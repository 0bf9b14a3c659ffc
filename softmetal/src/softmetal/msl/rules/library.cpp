// Functions and types of the library, section 6: the types and address spaces that they take.
#include <llvm/ADT/StringSet.h>

#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

// 6.9.2: reductions; 6.9.3: permutations and broadcasts.
const llvm::StringSet<> kReductions = {
    "simd_sum",
    "simd_product",
    "simd_min",
    "simd_max",
    "simd_prefix_inclusive_sum",
    "simd_prefix_exclusive_sum",
    "simd_prefix_inclusive_product",
    "simd_prefix_exclusive_product",
    "quad_sum",
    "quad_product",
    "quad_min",
    "quad_max",
    "quad_prefix_inclusive_sum",
    "quad_prefix_exclusive_sum",
    "quad_prefix_inclusive_product",
    "quad_prefix_exclusive_product",
};
const llvm::StringSet<> kBitReductions = {"simd_and", "simd_or", "simd_xor",
                                          "quad_and", "quad_or", "quad_xor"};
const llvm::StringSet<> kMoves = {
    "simd_broadcast",
    "simd_broadcast_first",
    "simd_shuffle",
    "simd_shuffle_xor",
    "simd_shuffle_up",
    "simd_shuffle_down",
    "simd_shuffle_rotate_up",
    "simd_shuffle_rotate_down",
    "simd_shuffle_and_fill_up",
    "simd_shuffle_and_fill_down",
    "quad_broadcast",
    "quad_broadcast_first",
    "quad_shuffle",
    "quad_shuffle_xor",
    "quad_shuffle_up",
    "quad_shuffle_down",
    "quad_shuffle_rotate_up",
    "quad_shuffle_rotate_down",
    "quad_shuffle_and_fill_up",
    "quad_shuffle_and_fill_down",
};
// 6.15: the operations of each atomic type; atomic int and uint have all.
const llvm::StringSet<> kMoveAtomics = {
    "atomic_load_explicit",
    "atomic_store_explicit",
    "atomic_exchange_explicit",
    "atomic_compare_exchange_weak_explicit",
};
const llvm::StringSet<> kAddAtomics = {"atomic_fetch_add_explicit", "atomic_fetch_sub_explicit"};

// The specialisation of a class template of the library's namespace metal.
const ClassTemplateSpecializationDecl* specialization(const Program& program, QualType type, StringRef name) {
  const auto* found = dyn_cast_or_null<ClassTemplateSpecializationDecl>(type->getAsCXXRecordDecl());
  return found && found->getName() == name && program.is_library(found) ? found : nullptr;
}

// The type without pointers, references and arrays.
QualType innermost(const ASTContext& context, QualType type) {
  for (;;) {
    type = context.getBaseElementType(type.getNonReferenceType());
    if (!type->isPointerType()) return type;
    type = type->getPointeeType();
  }
}

class Library : public Family {
 public:
  using Family::Family;

  void declaration(const Decl* declaration) override {
    if (const auto* constructor = dyn_cast<CXXConstructorDecl>(declaration))
      for (const CXXCtorInitializer* initializer : constructor->inits())
        if (initializer->getInit()->isGLValue()) refuse_element(initializer->getInit());
    const auto* value = dyn_cast<ValueDecl>(declaration);
    if (!value || !isa<VarDecl, FieldDecl>(value) || value->getType()->isDependentType()) return;
    if (const auto* variable = dyn_cast<VarDecl>(value)) check_bound(variable->getInit());
    const QualType type = innermost(program.context, value->getType());
    check_atomic_type(value, type);
    if (specialization(program, type, "simdgroup_matrix") && space_of(type) != Space::kThread)
      program.refuse(value->getLocation(), "'" + value->getName() + "' is a simdgroup_matrix in " +
                                               name_of(space_of(type)) +
                                               " memory: it can be in thread memory only");
  }

  void statement(const Stmt* statement) override {
    if (const auto* address = dyn_cast<UnaryOperator>(statement);
        address && address->getOpcode() == UO_AddrOf)
      refuse_element(address->getSubExpr());
    if (const auto* construct = dyn_cast<CXXConstructExpr>(statement))
      for (const Expr* argument : construct->arguments()) check_bound(argument);
    if (const auto* list = dyn_cast<InitListExpr>(statement); list && list->getType()->isRecordType())
      for (const Expr* value : list->inits()) check_bound(value);
    if (const auto* leave = dyn_cast<ReturnStmt>(statement);
        leave && program.function && program.function->getReturnType()->isReferenceType())
      refuse_element(leave->getRetValue());
    const auto* call = dyn_cast<CallExpr>(statement);
    if (!call || call->isTypeDependent()) return;
    const FunctionDecl* callee = call->getDirectCallee();
    const StringRef name = program.library_name(callee);
    if (callee && (!program.is_library(callee) || !name.empty()))
      for (const Expr* argument : call->arguments()) check_bound(argument);
    if (name.empty() || call->getNumArgs() == 0) return;
    if (name == "as_type") check_as_type(call, callee);
    if (name.starts_with("atomic_")) check_atomic(call, callee, name);
    if (kReductions.contains(name) || kMoves.contains(name))
      check_operand(call, name, "a number of up to 32 bits but bfloat", &is_number);
    if (kBitReductions.contains(name)) check_operand(call, name, "an integer of up to 32 bits", &is_integer);
  }

 private:
  // The types of tables 6.13 to 6.16, which lack 64-bit numbers and bool.
  static bool is_integer(const ASTContext& context, QualType type) {
    return type->isIntegerType() && !type->isBooleanType() && !type->isEnumeralType() &&
           context.getTypeSize(type) <= 32;
  }
  static bool is_number(const ASTContext& context, QualType type) {
    return is_integer(context, type) ||
           (type->isFloatingType() && !type->isBFloat16Type() && context.getTypeSize(type) <= 32);
  }

  void check_operand(const CallExpr* call, StringRef name, const char* wanted,
                     bool (*accepts)(const ASTContext&, QualType)) {
    QualType type = call->getArg(0)->getType().getCanonicalType().getUnqualifiedType();
    if (const auto* cast = dyn_cast<ImplicitCastExpr>(call->getArg(0)))
      if (cast->getCastKind() == CK_IntegralCast) type = cast->getType();
    const auto* vector = type->getAs<VectorType>();
    const QualType element = vector ? vector->getElementType() : type;
    if (element->isDependentType() || accepts(program.context, element)) return;
    program.refuse(call->getBeginLoc(), "'" + name + "' takes " + wanted + " or a vector of them, not '" +
                                            spelled(program, type) + "'");
  }

  // thread_elements() is a vector, so no reference binds to an element. A const reference binds to a copy,
  // which a member or a caller would outlive.
  void check_bound(const Expr* value) {
    if (value && value->isGLValue() && !value->getType().isConstQualified()) refuse_element(value);
  }

  void refuse_element(const Expr* e) {
    if (const auto* conditional = dyn_cast<ConditionalOperator>(e->IgnoreParenImpCasts())) {
      refuse_element(conditional->getTrueExpr());
      refuse_element(conditional->getFalseExpr());
      return;
    }
    const auto* element = dyn_cast<CXXOperatorCallExpr>(e->IgnoreParenImpCasts());
    if (!element || element->getOperator() != OO_Subscript || element->isTypeDependent()) return;
    const CXXRecordDecl* record = element->getArg(0)->getType()->getAsCXXRecordDecl();
    if (!record || !record->getIdentifier() || record->getName() != "ThreadElements" ||
        !program.is_library(record))
      return;
    program.refuse(e->getBeginLoc(),
                   "no reference or pointer can refer to an element of a simdgroup_matrix, as it is an "
                   "element of a vector");
  }

  void check_as_type(const CallExpr* call, const FunctionDecl* callee) {
    const auto* arguments = callee->getTemplateSpecializationArgs();
    if (!arguments) return;
    for (const TemplateArgument& argument : arguments->asArray()) {
      if (argument.getKind() != TemplateArgument::Type) continue;
      const QualType type = argument.getAsType().getCanonicalType();
      const bool is_packed = type->getAsCXXRecordDecl() && program.is_library(type->getAsCXXRecordDecl());
      if (type->isArithmeticType() || type->isVectorType() || is_packed) continue;
      program.refuse(call->getBeginLoc(),
                     "as_type is for scalars and vectors, not for '" + spelled(program, type) + "'");
    }
  }

  void check_atomic_type(const ValueDecl* value, QualType type) {
    const auto* atomic = specialization(program, type, "atomic");
    if (!atomic) return;
    const QualType element = atomic->getTemplateArgs()[0].getAsType();
    const bool exists = element->isSpecificBuiltinType(BuiltinType::Int) ||
                        element->isSpecificBuiltinType(BuiltinType::UInt) ||
                        element->isSpecificBuiltinType(BuiltinType::ULong) || element->isBooleanType() ||
                        element->isSpecificBuiltinType(BuiltinType::Float);
    if (!exists)
      program.refuse(value->getLocation(), "there is no atomic<" + spelled(program, element) +
                                               ">: an atomic is of int, uint, bool, ulong or float");
  }

  void check_atomic(const CallExpr* call, const FunctionDecl* callee, StringRef name) {
    if (callee->getNumParams() == 0) return;
    const QualType object = callee->getParamDecl(0)->getType()->getPointeeType();
    if (object.isNull()) return;
    const auto* atomic = specialization(program, object, "atomic");
    if (!atomic) return;
    const QualType element = atomic->getTemplateArgs()[0].getAsType();
    const bool moves = kMoveAtomics.contains(name), adds = kAddAtomics.contains(name);
    bool exists = true;
    if (element->isBooleanType())
      exists = moves;
    else if (element->isFloatingType())
      exists = (moves || adds) && space_of(object) == Space::kDevice;
    else if (program.context.getTypeSize(element) == 64)
      exists = (name == "atomic_max_explicit" || name == "atomic_min_explicit") &&
               space_of(object) == Space::kDevice;
    if (!exists)
      program.refuse(call->getBeginLoc(), "there is no '" + name + "' of an atomic " +
                                              spelled(program, element) + " in " + name_of(space_of(object)) +
                                              " memory");
  }
};

}  // namespace

std::unique_ptr<Family> library(Program& program) { return std::make_unique<Library>(program); }

}  // namespace softmetal::rules
