//! Each operation and each status code of the table, by hand-made descriptors.

use crate::common::*;


#[test]
fn a_noop_completes_with_a_record_only_if_asked() {
    let bench = Bench::new(|_| {});
    assert_eq!(bench.run(noop(RECORDS)).status, 0x01);
    bench.memory.put(RECORDS, &[0; 32]);
    bench.hand_in(noop(0));
    bench.hand_in(noop(RECORDS).without(8));
    bench.model.settle();
    assert_eq!(bench.record(RECORDS).status, 0, "without Request Completion Record success is not reported");
    assert_eq!(bench.model.counters().descriptors, 3);
}
