#include "server/daemon/gpu_status.h"

#include "server/device/devices.h"

namespace shardd {

void DescribeGpus(const std::vector<GpuFacts>& gpus, google::protobuf::RepeatedPtrField<v1::Gpu>* out) {
  for (const GpuFacts& facts : gpus) {
    v1::Gpu* const gpu = out->Add();
    gpu->set_device(facts.device);
    gpu->set_description(facts.description);
    gpu->set_pci_bus_id(facts.pci_bus_id);
    gpu->set_mps(facts.mps);
    gpu->set_persistence_mode(facts.persistence_mode);
    gpu->set_compute_mode(facts.compute_mode);
  }
}

}  // namespace shardd
