// The verdicts of the self-test in this process: for each size, by the gate, FATTN_TENSOR, the files of
// earlier processes and the self-test.
#pragma once

#include <string>

#include "gate.h"
#include "self_test.h"

namespace fattn {

// FATTN_TENSOR. `wrong`: what is wrong with it, "" if nothing; it is raised as ValueError where the setting
// matters first.
void use_units_setting(UnitsSetting setting, std::string wrong);
void check_units_setting();
// The folder of files; "": verdicts are not kept.
void use_verdict_folder(std::string folder);

// Adds what is known of a GPU, with its tuned rows.
void add_units_states(DeviceFacts& gpu);
// Grows whenever add_units_states may find something else.
uint64_t count_of_verdicts();

// Why sizes that do not pass the gate are off; "" if all pass.
std::string why_units_are_off(const DeviceFacts& gpu);
bool passes_gate(UnitsSize size, const DeviceFacts& gpu);
Verdict verdict_of(UnitsSize size, const DeviceFacts& gpu);

// Runs the self-test of a size that passes the gate and has no verdict. Raises ValueError for a wrong
// FATTN_TENSOR, and nothing else.
void test_size(UnitsSize size, const DeviceFacts& gpu);
// Leaves it to the next test_delayed_sizes. Raises likewise.
void delay_test(UnitsSize size);
void test_delayed_sizes(const DeviceFacts& gpu);

// Compiles a plan of this size. If that fails, the size is off from now on, or with a setting by hand has the
// next variant.
bool compiles(const Plan& plan, UnitsSize size, const DeviceFacts& gpu);

}  // namespace fattn
