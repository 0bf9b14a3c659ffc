// GNUstep includes this when blocks are on; the blocks runtime on Linux is libBlocksRuntime.
#pragma once
#include <Block.h>
