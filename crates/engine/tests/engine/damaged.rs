//! Packets that are damaged in transit, unnoticed by TCP: the destination refuses them, their pages are retransmitted,
//! and the guest arrives intact. If everything is damaged, or the source does not receive the refusals, the migration
//! ends and the guest continues at the source.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, PAGE, Running, Workload, both_sides, faults_can_be_watched, log_of, monitors};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::{ReceiveReport, Report};
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::transport::Security;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::ram::GuestRam;
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind, REPLY_PREFIX_LENGTH};
use sterna_wire::limits::MAX_CONTENT;
use sterna_wire::packet::{ACK_LENGTH, ChannelAnswer, PACKET_HEADER_LENGTH, PAGE_REQUEST_LENGTH, PacketHeader};

/// 4 KiB pages of a huge page.
const HUGE_PAGE: u64 = 512;
/// Pages of the first huge page that a guest writes.
const FEW: u64 = 16;
/// 4 KiB pages of a packet.
const PACKET_PAGES: u64 = 16;

const WRITES: Workload = Workload { writers: 2, span: 500, seed: 11, burst: 40 };

/// Selects the packets with content to damage, by their number over all RAM channels.
type Plan = fn(u64) -> bool;

/// Relays connections to the destination, and flips bits in the payload of packets on RAM channels.
struct Damaging {
    address: SocketAddr,
    damaged: Arc<AtomicU64>,
}

impl Damaging {
    fn start(to: SocketAddr, plan: Plan, deaf: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, damaged, passed) = (listener.local_addr().unwrap(), Arc::default(), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&damaged);
        // The thread ends with the process.
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(to) else { continue };
                let (back_from, back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
                let (passed, damaged) = (Arc::clone(&passed), Arc::clone(&counted));
                std::thread::spawn(move || carry(near, far, Some(packets_of(&passed, &damaged, plan))));
                std::thread::spawn(move || {
                    if deaf { without_refusals(back_from, back_to) } else { carry(back_from, back_to, None) }
                });
            }
        });
        Self { address, damaged }
    }

    fn damaged(&self) -> u64 {
        self.damaged.load(Ordering::SeqCst)
    }
}

/// Changes the payload of each packet of a RAM channel.
type Each<'a> = Box<dyn FnMut(&mut [u8]) + 'a>;

fn packets_of<'a>(passed: &'a AtomicU64, damaged: &'a AtomicU64, plan: Plan) -> Each<'a> {
    Box::new(move |payload| {
        let number = passed.fetch_add(1, Ordering::SeqCst);
        if !payload.is_empty() && plan(number) {
            let at = number as usize * 37 % payload.len();
            payload[at] ^= 1 << (number % 8);
            damaged.fetch_add(1, Ordering::SeqCst);
        }
    })
}

/// Relays one direction until it ends; on a RAM channel packet by packet.
fn carry(mut from: TcpStream, mut to: TcpStream, packets: Option<Each<'_>>) {
    let passes = || -> std::io::Result<()> {
        if let Some(mut each) = packets {
            let mut header = [0; CHANNEL_HEADER_LENGTH];
            from.read_exact(&mut header)?;
            to.write_all(&header)?;
            if ChannelHeader::decode(&header).is_ok_and(|header| header.kind == ChannelKind::Ram) {
                let mut header = [0; PACKET_HEADER_LENGTH];
                let mut rest = Vec::new();
                loop {
                    from.read_exact(&mut header)?;
                    let packet = PacketHeader::decode(&header, MAX_CONTENT).map_err(std::io::Error::other)?;
                    rest.resize(packet.table_length as usize + packet.payload_length as usize, 0);
                    from.read_exact(&mut rest)?;
                    each(&mut rest[packet.table_length as usize..]);
                    to.write_all(&header)?;
                    to.write_all(&rest)?;
                }
            }
        }
        std::io::copy(&mut from, &mut to).map(drop)
    };
    // However it ends, this direction is over.
    let _ = passes();
    let _ = to.shutdown(Shutdown::Write);
}

/// Relays a destination's messages except its refusals, so that the source does not receive them.
fn without_refusals(mut from: TcpStream, mut to: TcpStream) {
    let mut passes = || -> std::io::Result<()> {
        let mut reply = [0; REPLY_PREFIX_LENGTH];
        from.read_exact(&mut reply)?;
        to.write_all(&reply)?;
        let mut answer = [0; ACK_LENGTH];
        from.read_exact(&mut answer)?;
        let mut is_ram = ChannelAnswer::decode(&answer).is_ok();
        while is_ram {
            match ChannelAnswer::decode(&answer) {
                Ok(ChannelAnswer::Placed(_)) => to.write_all(&answer)?,
                Ok(ChannelAnswer::Refused(refusal)) => {
                    from.read_exact(&mut vec![0; refusal.requests as usize * PAGE_REQUEST_LENGTH])?;
                }
                Err(_) => is_ram = false,
            }
            from.read_exact(&mut answer)?;
        }
        to.write_all(&answer)?;
        std::io::copy(&mut from, &mut to).map(drop)
    };
    // However it ends, this direction is over.
    let _ = passes();
    let _ = to.shutdown(Shutdown::Write);
}

/// A dirty log that names written pages as write protection does: in units of the block's page size.
struct ByPage {
    log: Box<dyn DirtyLog>,
    ram: GuestRam,
}

impl DirtyLog for ByPage {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.log.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        let (pages, size) = (self.ram.blocks()[block].pages(), (self.ram.blocks()[block].page_size() / PAGE) as u64);
        let mut named = PageBitmap::new(pages);
        self.log.collect(block, &mut named)?;
        let mut at = 0;
        while let Some(run) = named.next_run(at, u64::MAX) {
            at = run.end;
            dirty.set(run.start / size * size..run.end.next_multiple_of(size));
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}

type Outcome<T> = Result<T, MigrationError>;

/// Returns the memory of both sides. Every page of the source's has content, whatever the guest has written by then, and shrinks.
fn memories() -> [Arc<Memory>; 2] {
    let memories = [0; 2].map(|_| Memory::new(1500, 700));
    for block in 0..2 {
        let words = memories[0].words(block).iter().enumerate();
        words.for_each(|(at, word)| word.store(at as u64 | 1, Ordering::Relaxed));
    }
    memories
}

/// Moves a guest that writes over a path that damages packets.
fn migrate(
    plan: Plan,
    workload: Workload,
    settings: impl FnOnce(Source) -> Source,
    look: impl FnOnce(&Memory, &mut Monitor, &mut Monitor, &Running),
) -> (Outcome<Report>, Outcome<ReceiveReport>, u64) {
    migrate_by(memories(), |to| Damaging::start(to, plan, false), workload, settings, look)
}

fn migrate_by(
    [source, destination]: [Arc<Memory>; 2],
    relay: impl FnOnce(SocketAddr) -> Damaging,
    workload: Workload,
    settings: impl FnOnce(Source) -> Source,
    look: impl FnOnce(&Memory, &mut Monitor, &mut Monitor, &Running),
) -> (Outcome<Report>, Outcome<ReceiveReport>, u64) {
    let running = Running::default();
    let (mut from, log, mut to) = monitors([&source, &destination], &running, workload);
    // Pages that were sent before, also if the writers never run meanwhile.
    from.last_writes = FEW;
    from.start();
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let relay = relay(listening.address().to_string().parse().unwrap());
    let log = ByPage { log: log_of(&from, log), ram: source.ram() };
    let mut migration = settings(Source::new(source.ram(), Box::new(log)).method(MethodChoice::default()));
    let address = sterna_engine::transport::Address::from(relay.address);
    let (sent, received) =
        both_sides(listening, &mut to, || migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()));
    look(&destination, &mut from, &mut to, &running);
    (sent, received, relay.damaged())
}

#[test]
fn damaged_packets_are_retransmitted_and_the_guest_arrives_intact() {
    within_a_minute(|| {
        for (method, channels, deltas) in [("none", 1, 0), ("lz4", 3, 0), ("zstd", 2, 64 << 20), ("none", 4, 64 << 20)]
        {
            let choice = method.parse().unwrap();
            let settings =
                |source: Source| source.method(choice).channels(channels).packet_size(64 << 10).delta_cache(deltas);
            // This includes the first ones, and the last ones of a round and of the switchover.
            let plan: Plan = |number| number % 9 == 2 && number < 300;
            // Before the destination's monitor starts the guest, it compares memory with that of the paused source.
            let (sent, received, damaged) = migrate(plan, WRITES, settings, |_, from, to, running| {
                assert!(to.runs() && !from.runs() && !running.ever_twice(), "{method}");
            });
            let sent = sent.unwrap_or_else(|error| panic!("{method}: {error}"));
            received.unwrap_or_else(|error| panic!("{method}: {error}"));
            let refused = u64::from(sent.refused_packets);
            assert!(damaged > 3 && refused <= damaged, "{method}: {refused} of {damaged}");
            // A compressed packet with a changed bit may still decode to the same content.
            assert!(
                refused > damaged / 2 && (method != "none" || refused == damaged),
                "{method}: {refused} of {damaged}"
            );
        }
    });
}

#[test]
fn of_huge_pages_only_changed_parts_are_sent_again_and_the_guest_arrives_intact() {
    within_a_minute(|| {
        // The guest writes the first pages of the first huge page, or at random places in all of the memory.
        let all = 8 * HUGE_PAGE;
        let plans: [(&str, u16, usize, u64, Plan); 5] = [
            ("none", 1, 0, FEW, |_| false),
            ("none", 2, 0, FEW, |number| number % 9 == 2 && number < 300),
            ("none", 2, 0, all, |number| number % 9 == 2 && number < 300),
            ("zstd", 3, 0, all, |number| number % 5 == 1 && number < 150),
            ("lz4", 2, 32 << 20, all, |number| number % 9 == 2 && number < 300),
        ];
        for (method, channels, deltas, span, plan) in plans {
            let choice = method.parse().unwrap();
            let settings = |source: Source| {
                let source = source.method(choice).channels(channels).packet_size(PACKET_PAGES as usize * PAGE);
                source.delta_cache(deltas as u64)
            };
            let workload = Workload { span, ..WRITES };
            let memory = [0; 2].map(|_| Memory::of_huge_pages(8, true).unwrap());
            // Each region has content from the beginning.
            memory[0].words(0).chunks(PAGE / 8).enumerate().for_each(|(page, words)| {
                words[3].store(page as u64 + 1, Ordering::Relaxed);
            });
            let pages = memory[0].pages()[0];
            // Before the destination's monitor starts the guest, it compares memory with that of the paused source.
            let (sent, received, _) = migrate_by(
                memory,
                |to| Damaging::start(to, plan, false),
                workload,
                settings,
                |_, from, to, running| {
                    assert!(to.runs() && !from.runs() && !running.ever_twice(), "{method}");
                },
            );
            let sent = sent.unwrap_or_else(|error| panic!("{method}: {error}"));
            received.unwrap_or_else(|error| panic!("{method}: {error}"));
            // The log names the whole huge page for each write. How much of all memory a guest changes between two rounds depends on its speed.
            // Pages of a refused packet are sent again whatever they hold.
            let refused = u64::from(sent.refused_packets) * PACKET_PAGES;
            let least = (HUGE_PAGE - FEW).saturating_sub(refused);
            assert!(span == all || sent.same_pages >= least, "{method}: {sent:?}");
            assert!(sent.normal_pages >= pages + sent.same_pages, "{method}: {sent:?}");
        }
    });
}

#[test]
fn packets_damaged_up_to_the_last_round_are_retransmitted_before_the_guest_starts() {
    within_a_minute(|| {
        // All packets up to the limit; if there are so few, this includes the last round's.
        let plan: Plan = |number| number < 30;
        let settings = |source: Source| source.channels(1).packet_size(1 << 20);
        let (sent, received, damaged) = migrate(plan, WRITES, settings, |_, _, to, _| assert!(to.runs()));
        assert_eq!(u64::from(sent.unwrap().refused_packets), damaged);
        received.unwrap();
        // How many packets there are depends on the rounds; the first round alone has most of these.
        assert!((20..=30).contains(&damaged), "{damaged}");
    });
}

#[test]
fn a_path_that_damages_everything_ends_the_migration_and_the_guest_continues() {
    within_a_minute(|| {
        let settings = |source: Source| source.packet_size(64 << 10);
        let (sent, received, _) = migrate(
            |_| true,
            WRITES,
            settings,
            |_, from, to, running| {
                assert!(from.runs() && !to.runs() && !running.ever_twice());
            },
        );
        let error = sent.unwrap_err();
        assert_eq!(error.guest, GuestState::RunsAtSource, "{error}");
        assert!(error.to_string().contains("has refused more than 64 packets"), "{error}");
        received.unwrap_err();
    });
}

#[test]
fn if_refused_pages_are_not_retransmitted_the_guest_is_not_started() {
    within_a_minute(|| {
        let relay = |to| Damaging::start(to, |_| true, true);
        let (sent, received, damaged) = migrate_by(
            memories(),
            relay,
            WRITES,
            |source| source,
            |_, from, to, running| {
                assert!(from.runs() && !to.runs() && !running.ever_twice());
            },
        );
        let reason = received.unwrap_err().to_string();
        assert!(
            damaged > 0 && reason.contains("pages arrived damaged, and the source has not sent them again"),
            "{reason}"
        );
        assert_eq!(sent.unwrap_err().guest, GuestState::RunsAtSource);
    });
}

#[test]
fn packets_damaged_before_and_during_post_copy_are_retransmitted() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let busy = Workload { writers: 2, span: 1500, seed: 7, burst: 0 };
        let settings = |source: Source| {
            source
                .channels(2)
                .packet_size(64 << 10)
                .bandwidth(Some(40 << 20))
                .downtime(Duration::from_millis(10))
                .when_not_converging(NotConverging::PostCopyAfter(1))
        };
        // In post-copy a damaged packet ends all channels, which are then reconnected: this happens once.
        let plan: Plan = |number| number % 10 == 3 && number < 130 || number == 190;
        let (sent, received, damaged) = migrate(plan, busy, settings, |destination, from, to, running| {
            assert!(to.runs() && !from.runs() && !running.ever_twice());
            to.stop();
            let behind = to.behind.as_ref().unwrap();
            assert_eq!(behind.wrong.load(Ordering::Relaxed), 0);
            assert_eq!(behind.differing_pages(destination), 0);
        });
        let sent = sent.unwrap();
        received.unwrap();
        assert!(damaged > 10 && sent.post_copy.is_some(), "{damaged}: {sent:?}");
        println!("{damaged} damaged, {} refused, {:?}", sent.refused_packets, sent.post_copy);
    });
}
