//! An entry never waits for itself.
//!
//! Pages wait in an entry's open batches, one per channel, and count in the window meanwhile. If the window is full
//! before any of these batches is, nothing is in flight whose acknowledgement could make room: the entry itself must
//! submit its batches before it waits.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{PAGE, Placed, halves, sockets, within_a_minute};
use sterna_engine::abort::Abort;
use sterna_engine::batch::{BatchPool, REGION};
use sterna_engine::entry::{Entry, Pipeline};
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, PacketRules, ReceiveCounters, receive_packets};
use sterna_engine::send::{Compression, SendChannel, SendContext};
use sterna_engine::window::{Window, WindowClosed};
use sterna_wire::packet::RunKind;

/// Minimum initial size of a window, in bytes, and the constant size of this one: without an allowance it does not
/// grow.
const WINDOW: usize = 4 << 20;
/// One batch fills the window, and so do two that are half full.
const PACKET: usize = WINDOW;
const RULES: PacketRules = PacketRules { packet_size: PACKET, checksums: true };
/// Pages of a region, which all take the same channel.
const REGION_PAGES: u64 = REGION / PAGE as u64;
const REGIONS: u64 = 8;

/// Sends all pages of all regions by `send`, through `channels` channels and a window of one batch, and checks that
/// each arrives once.
fn all_pages_arrive(channels: usize, send: impl FnOnce(&mut Entry)) {
    let window = Arc::new(Window::new(WINDOW as u64 / 2, Duration::ZERO, Duration::ZERO));
    assert_eq!(window.size(), WINDOW as u64);
    let abort = Arc::new(Abort::default());
    let context = SendContext::new(
        Arc::clone(&window),
        Arc::new(Pacer::new(None)),
        Arc::clone(&abort),
        Compression::none(),
        RULES,
    );
    let placed = Placed::default();
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for index in 0..channels {
        let (near, far) = sockets();
        let (writer, reader) = halves(near);
        senders.push(SendChannel::start(&format!("ram-{index}"), writer, reader, context.clone()).unwrap());
        let mut sink = ChannelSink::new().with_pages(placed.clone());
        receivers.push(std::thread::spawn(move || {
            let (mut writer, mut reader) = halves(far);
            receive_packets(&mut reader, Some(&mut writer), &mut sink, RULES, &ReceiveCounters::default())
        }));
    }
    // One open batch for each channel, one that is being filled, and one in flight for each channel.
    let pool = BatchPool::new(2 * channels + 1, PACKET);
    let pipeline = Arc::new(Pipeline { channels: senders, pool, window: Arc::clone(&window), page_size: PAGE });
    let mut entry = Entry::new(Arc::clone(&pipeline));

    send(&mut entry);
    entry.flush().unwrap();
    for channel in &pipeline.channels {
        channel.drained().unwrap();
    }

    drop(entry);
    abort.finish();
    Arc::try_unwrap(pipeline).expect("no other owner is left").channels.into_iter().for_each(SendChannel::join);
    for receiver in receivers {
        receiver.join().unwrap().unwrap();
    }
    // Checked after the channels' threads have ended: packets leave the window a moment after they count as
    // acknowledged.
    assert_eq!((window.size(), window.in_flight()), (WINDOW as u64, 0), "empty, and as small as it was");
    let mut arrived = placed.take();
    arrived.sort_unstable_by_key(|(page, _)| *page);
    assert_eq!(arrived.len() as u64, REGIONS * REGION_PAGES);
    for (expected, (page, content)) in arrived.into_iter().enumerate() {
        assert_eq!((page, content), (expected as u64, content_of(page)), "page {page}");
    }
}

/// Returns the content of each page.
fn content_of(page: u64) -> Vec<u8> {
    (page + 1).to_le_bytes().repeat(PAGE / 8)
}

fn send_page(entry: &mut Entry, page: u64) {
    entry.enter(PAGE as u64).unwrap();
    entry.page(0, page * PAGE as u64, &content_of(page)).unwrap();
}

/// Sends a page of each of `apart` regions in turn, until all pages of all regions were sent.
fn send_alternating(entry: &mut Entry, apart: u64) {
    for first_region in (0..REGIONS).step_by(apart as usize) {
        for page in 0..REGION_PAGES {
            for region in first_region..first_region + apart {
                send_page(entry, region * REGION_PAGES + page);
            }
        }
    }
}

#[test]
fn pages_that_alternate_between_two_channels_arrive() {
    within_a_minute(|| all_pages_arrive(2, |entry| send_alternating(entry, 2)));
}

#[test]
fn pages_that_alternate_between_four_channels_arrive() {
    within_a_minute(|| all_pages_arrive(4, |entry| send_alternating(entry, 4)));
}

#[test]
fn a_whole_region_arrives_although_single_pages_of_another_fill_the_window() {
    // Regions page by page, into the open batch of one channel, and between them regions at once, to the other channel:
    // at every second of those the open batch has become as large as the window, and nothing else is in flight.
    let send = |entry: &mut Entry| {
        for region in (0..REGIONS).step_by(2) {
            let first = region * REGION_PAGES;
            (first..first + REGION_PAGES).for_each(|page| send_page(entry, page));

            let pages = first + REGION_PAGES..first + 2 * REGION_PAGES;
            let offsets = || pages.clone().map(|page| page * PAGE as u64);
            let channel = entry.common_channel(0, offsets()).unwrap();
            entry.enter(REGION).unwrap();
            let fill = |room: &mut [u8]| -> Result<(), WindowClosed> {
                room.copy_from_slice(&pages.clone().flat_map(content_of).collect::<Vec<_>>());
                Ok(())
            };
            entry.bytes(channel, 0, offsets().map(|offset| (offset, RunKind::Normal)), fill).unwrap();
        }
    };
    within_a_minute(move || all_pages_arrive(2, send));
}
