// GNUstep includes this header if blocks are enabled; libBlocksRuntime is the blocks runtime on Linux.
#pragma once
#include <Block.h>
