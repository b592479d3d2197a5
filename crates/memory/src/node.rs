//! Finds the NUMA node of memory: accelerators are used on the node of the pages.

use std::ops::Range;

use crate::PAGE_SIZE;

/// Pages that are sampled, spread over the range.
const SAMPLES: usize = 64;

/// Returns the NUMA node of most sampled pages of `addresses`. None if none of these was ever touched, or the system
/// does not report nodes.
///
/// Uses move_pages(2), which without target nodes only queries, and touches no page.
pub fn node_of(addresses: Range<usize>) -> Option<u32> {
    let pages = addresses.len() / PAGE_SIZE;
    let count = pages.min(SAMPLES);
    let mut places = [std::ptr::null::<libc::c_void>(); SAMPLES];
    let mut nodes = [-libc::ENOENT; SAMPLES];
    for (sample, place) in places[..count].iter_mut().enumerate() {
        let page = sample * pages / count;
        *place = std::ptr::without_provenance(addresses.start + page * PAGE_SIZE);
    }
    // SAFETY: both lists have `count` entries; the kernel reads the first, writes the second, and does not touch what the
    // addresses name: those that are not mapped are told by an error number in their place.
    let said = unsafe {
        libc::syscall(libc::SYS_move_pages, 0, count, places.as_ptr(), std::ptr::null::<i32>(), nodes.as_mut_ptr(), 0)
    };
    if said != 0 {
        return None;
    }
    let known = || nodes[..count].iter().filter_map(|node| u32::try_from(*node).ok());
    known().max_by_key(|node| known().filter(|other| other == node).count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_util::Area;

    #[test]
    fn memory_has_a_node_once_it_is_touched_and_is_not_touched_by_the_query() {
        let area = Area::small_pages(1000 * PAGE_SIZE);
        let addresses = area.ptr().addr()..area.ptr().addr() + 1000 * PAGE_SIZE;
        assert_eq!(node_of(addresses.clone()), None, "pages that were never touched are nowhere");
        let mut touched = 0;
        crate::holes::PageMap::own().unwrap().populated(addresses.clone(), |part| touched += part.len()).unwrap();
        assert_eq!(touched, 0);

        area.bytes_mut().fill(1);
        let node = node_of(addresses).expect("every machine has a node");
        assert!(std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).exists(), "{node}");
        assert_eq!(node_of(0..0), None);
    }
}
