//! Pages sent from where they lie in guest RAM, without a copy: where neither a checksum nor a codec looks at their content,
//! so that it does not matter that the guest writes them meanwhile. What it has written since the dirty log was cleared is
//! sent again.

use std::io;

use arrayvec::ArrayVec;
use sterna_memory::PAGE_SIZE;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_memory::raw::KernelPart;
use sterna_wire::packet::{Run, RunKind};

use crate::batch::Batch;
use crate::transport::Writer;

/// Parts given to the kernel with one system call.
const PARTS: usize = 64;

/// Records in the runs of `batch` which of the pages of `runs` are zero. The batch gets no content. Of the zero pages, those of `ratio` count as
/// normal.
pub(crate) fn find_zero_pages(ram: &GuestRam, runs: &[Run], batch: &mut Batch, ratio: &mut NormalPageRatio) {
    let block = &ram.blocks()[usize::from(batch.block)];
    let mut normal = 0;
    for page in runs.iter().flat_map(|run| run.first..run.end()) {
        if block.is_zero(page) && !ratio.takes_next() {
            batch.push_zero(page, 1);
        } else {
            batch.push_normal(page, 1, 0);
            normal += PAGE_SIZE;
        }
    }
    batch.set_in_window(normal as u64);
}

/// Writes a packet whose content are the normal pages of `runs`.
pub(crate) fn write(
    writer: &mut Writer,
    header: &[u8],
    table: &[u8],
    block: &RamBlock,
    runs: &[Run],
) -> io::Result<()> {
    let mut parts: ArrayVec<KernelPart<'_>, PARTS> = [header, table].into_iter().map(KernelPart::from).collect();
    for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
        if parts.is_full() {
            writer.pass_on(&mut parts)?;
            parts.clear();
        }
        parts.push(block.kernel_part(run.first..run.end()));
    }
    writer.pass_on(&mut parts)
}
