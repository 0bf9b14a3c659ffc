// This process's verdicts for each size, from the gate, FATTN_TENSOR, files of earlier processes and the
// self-test.
#pragma once

#include <string>

#include "gate.h"
#include "self_test.h"

namespace fattn {

// Sets FATTN_TENSOR. `wrong`: its error, "" if valid; raised as ValueError where the setting is first used.
void use_units_setting(UnitsSetting setting, std::string wrong);
void check_units_setting();
// Sets the folder of files; "": verdicts are not stored.
void use_verdict_folder(std::string folder);

// Adds the known states of a GPU with its tuned rows.
void add_units_states(DeviceFacts& gpu);
// Increases whenever the result of add_units_states may change.
uint64_t count_of_verdicts();

// Why sizes that do not pass the gate are off; "" if all pass.
std::string why_units_are_off(const DeviceFacts& gpu);
bool passes_gate(UnitsSize size, const DeviceFacts& gpu);
Verdict verdict_of(UnitsSize size, const DeviceFacts& gpu);

// Runs the self-test of a size that passes the gate and lacks a verdict. Raises only ValueError, for an
// invalid FATTN_TENSOR.
void test_size(UnitsSize size, const DeviceFacts& gpu);
// Defers it to the next test_delayed_sizes. Raises likewise.
void delay_test(UnitsSize size);
void test_delayed_sizes(const DeviceFacts& gpu);

// Compiles a plan of this size. If that fails, the size is off from now on; with an explicit setting it
// changes to the next variant.
bool compiles(const Plan& plan, UnitsSize size, const DeviceFacts& gpu);

}  // namespace fattn
