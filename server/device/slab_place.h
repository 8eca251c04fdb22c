#ifndef SHARDD_SERVER_DEVICE_SLAB_PLACE_H_
#define SHARDD_SERVER_DEVICE_SLAB_PLACE_H_

#include <vector>

namespace shardd {

class DeviceMemory;

// Where memory of a rank is. Null: on the host.
struct SlabPlace {
  DeviceMemory* memory = nullptr;
  // The devices of all ranks of the job, each once: rank r's is users[r mod users.size()]. The job's slabs are spread
  // over them.
  std::vector<DeviceMemory*> users;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_SLAB_PLACE_H_
