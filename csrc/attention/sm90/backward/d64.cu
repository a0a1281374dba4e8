#include "csrc/attention/sm90/backward/launch.cuh"

// Its consumer warpgroups are those of consumer_narrow.cuh.
const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD64 = BackwardInstance<64, 64, 128, 128, 2, 2, 2>::kKernel;
