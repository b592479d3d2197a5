//! Sides that violate the rules about the state of devices: they are refused with the reason, and the guest stays where
//! it is.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::common::within_a_minute;
use crate::device::{Device, Devices};
use crate::guest::{Memory, Monitor, Running, Workload};
use sterna_codec::Encoding;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::ControlLink;
use sterna_engine::destination::Destination;
use sterna_engine::migration::GuestState;
use sterna_engine::session::{
    self, Features, Handshake, Offer, OnConnectionEvent, Peer, PeerEvent, Session, link_events,
};
use sterna_engine::source::{Source, TimeLimits};
use sterna_engine::transport::simulated::Network;
use sterna_engine::transport::{Address, Connection, Limits, Listener, Security, Writer, accept_channel, open_channel};
use sterna_wire::checksum::crc32c;
use sterna_wire::control::{Block, ControlMessage, Device as DeviceId, DeviceChannels, Machine, Mode};
use sterna_wire::device::MIN_CREDIT;
use sterna_wire::header::ChannelKind;
use sterna_wire::packet::{PacketHeader, PacketKind};

const CALM: Workload = Workload { writers: 1, span: 100, seed: 1, burst: 8 };
const PAGES: [usize; 2] = [200, 100];
const FEATURES: Features<'_> =
    Features { offered: &["guest-state-1", "device-state-1"], required: &["guest-state-1", "device-state-1"] };
const DEVICES: u32 = 2;

fn devices() -> Devices {
    Devices((0..DEVICES).map(|instance| Device::new("device", instance, 0, 1000)).collect())
}

/// A source that writes the packets of a test.
struct OddSource {
    address: Address,
    session: Session,
    sequence: u64,
}

impl OddSource {
    fn open(&self, kind: ChannelKind, index: u16) -> Result<Writer, String> {
        let Session { key, id, incarnation, .. } = &self.session;
        let connection = Connection::connect(&self.address, &Security::Insecure).unwrap();
        let (writer, reader, _) =
            open_channel(connection, key, *id, kind, index, *incarnation).map_err(|error| error.to_string())?;
        // The channel's acknowledgements are not read; it is only kept open.
        std::mem::forget(reader);
        Ok(writer)
    }

    /// A piece of a device's state.
    fn piece(&mut self, to: &mut Writer, kind: PacketKind, device: u16, place: u64, content: &[u8]) {
        self.sequence += 1;
        let header = PacketHeader {
            kind,
            method: 0,
            subject: device,
            sequence: self.sequence,
            table_length: 0,
            payload_length: content.len() as u32,
            content_length: content.len() as u32,
            content_checksum: crc32c(content),
            detail: place,
        };
        // The source may have been refused already.
        let _ = to.write_all_vectored(&[&header.encode(&[]), content]);
    }
}

/// Returns the reason for which a destination refuses a source that does this, over these channels.
fn refusal(channels: DeviceChannels, odd: impl FnOnce(&mut OddSource) + Send) -> String {
    let memory = Memory::new(PAGES[0], PAGES[1]);
    let (mut to, _) = Monitor::new(&memory, &Running::default(), CALM);
    let destination = devices().at_destination(Destination::new(memory.ram()));
    let destination = destination.device_queue(u64::from(DEVICES) * MIN_CREDIT).linger(Duration::ZERO);
    let port = Network::new(1).port("there");
    let listening = destination.listen(port, &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let error = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| listening.run(&mut to, &Cancel::new(), &()));
        let block =
            |(name, pages): (&str, usize)| Block { name: name.into(), bytes: pages as u64 * 4096, page_size: 4096 };
        let machine = Machine {
            blocks: ["low", "high"].into_iter().zip(PAGES).map(block).collect(),
            devices: (0..DEVICES).map(|instance| DeviceId::new("device", instance)).collect(),
            device_channels: channels,
            ..Machine::default()
        };
        let offer = Offer {
            to: &address,
            security: &Security::Insecure,
            channels: 1,
            packet_size: 64 << 10,
            machine,
            mode: Mode::Embedded,
            features: FEATURES,
            encoding: Encoding::default(),
            patience: Duration::ZERO,
        };
        let (sender, news) = channel();
        let on_event: OnConnectionEvent = Arc::new(move |event| drop(sender.send(event)));
        let (link, session) = session::dial(&offer, &Cancel::new(), &on_event).unwrap();
        let mut peer = Peer::new(link);
        odd(&mut OddSource { address: address.clone(), session, sequence: 0 });
        // Until the destination has disconnected or reported a failure; then this source disconnects.
        for event in news {
            if let Some(PeerEvent::Lost(_) | PeerEvent::Message(ControlMessage::Failed(_), _)) = peer.handle(event) {
                break;
            }
        }
        peer.hang_up();
        receiving.join().unwrap().unwrap_err()
    });
    assert_eq!(error.guest, GuestState::NotHere, "{error}");
    assert!(!to.called.contains(&"load") && !to.called.contains(&"start"), "{:?}", to.called);
    error.reason
}

#[test]
fn impossible_pieces_are_refused() {
    within_a_minute(|| {
        type Pieces = &'static [(PacketKind, u16, u64, usize)];
        use PacketKind::{DeviceAhead, DeviceBuffer, DeviceEnd};
        let cases: [(Pieces, &str); 7] = [
            (&[(DeviceBuffer, 2, 0, 10)], "there is no device 2"),
            (
                &[(DeviceBuffer, 1, 4, 10), (DeviceBuffer, 1, 4, 10)],
                "device/1: piece 4 of the device's state has come twice",
            ),
            (
                &[(DeviceEnd, 0, 3, 0), (DeviceBuffer, 0, 4, 10)],
                "device/0: piece 4 of the device's state lies behind its end",
            ),
            (
                &[(DeviceBuffer, 0, 4, 10), (DeviceEnd, 0, 3, 0)],
                "device/0: piece 4 of the device's state lies behind its end",
            ),
            (&[(DeviceAhead, 0, 0, 10)], "a mark in a device's state with content"),
            (&[(DeviceEnd, 0, 0, 1)], "a mark in a device's state with content"),
            (
                &[(DeviceBuffer, 0, 1, 40_000), (DeviceBuffer, 0, 2, 40_000)],
                "more of the device's state has come than was permitted",
            ),
        ];
        for (pieces, words) in cases {
            for channels in [DeviceChannels::Mixed, DeviceChannels::Own(1), DeviceChannels::Serial] {
                let reason = refusal(channels, |source| {
                    let (kind, index) = match channels {
                        DeviceChannels::Mixed => (ChannelKind::Ram, 0),
                        DeviceChannels::Own(_) => (ChannelKind::DeviceState, 1),
                        DeviceChannels::Serial => (ChannelKind::DeviceState, 0),
                    };
                    let mut channel = source.open(kind, index).unwrap();
                    for (kind, device, place, bytes) in pieces {
                        source.piece(&mut channel, *kind, *device, *place, &vec![7; *bytes]);
                    }
                });
                assert!(reason.contains(words), "{channels:?}: {reason}");
            }
        }
    });
}

#[test]
fn a_source_that_sends_only_marks_uses_bounded_memory() {
    within_a_minute(|| {
        let reason = refusal(DeviceChannels::Mixed, |source| {
            let mut channel = source.open(ChannelKind::Ram, 0).unwrap();
            for place in 1..100 {
                source.piece(&mut channel, PacketKind::DeviceAhead, 0, place, &[]);
            }
        });
        assert!(reason.contains("more of the device's state has come than was permitted"), "{reason}");
    });
}

#[test]
fn device_state_is_accepted_only_on_negotiated_channels() {
    within_a_minute(|| {
        let ways = [
            (DeviceChannels::Mixed, ChannelKind::Ram, 0),
            (DeviceChannels::Own(1), ChannelKind::DeviceState, 1),
            (DeviceChannels::Serial, ChannelKind::DeviceState, 0),
        ];
        for (agreed, ..) in ways {
            for (other, kind, index) in ways.into_iter().filter(|(way, ..)| *way != agreed) {
                let mut refused = None;
                let reason = refusal(agreed, |source| match source.open(kind, index) {
                    Ok(mut channel) => source.piece(&mut channel, PacketKind::DeviceBuffer, 0, 0, b"state"),
                    Err(error) => {
                        // There is no such channel. The migration continues until this source ends it.
                        refused = Some(error);
                        let mut channel = source.open(ChannelKind::Ram, 0).unwrap();
                        source.piece(&mut channel, PacketKind::DeviceBuffer, 9, 0, b"state");
                    }
                });
                let actual = refused.unwrap_or(reason);
                let expected = ["on a channel that is not for it", "is not expected here"];
                assert!(expected.iter().any(|words| actual.contains(words)), "{agreed:?}, {other:?}: {actual}");
            }
        }
    });
}

#[test]
fn a_destination_that_names_devices_that_do_not_exist_is_refused_and_the_guest_continues() {
    within_a_minute(|| {
        let credit = |device, up_to| ControlMessage::DeviceCredit { device, up_to };
        let cases = [
            (credit(2, 1 << 20), "the destination names a device 2, which does not exist"),
            (credit(0, MIN_CREDIT - 1), "a credit of 65535 bytes for a device is less than 65536"),
            (credit(0, 0), "a credit of 0 bytes"),
        ];
        for (odd, words) in cases {
            let memory = Memory::new(PAGES[0], PAGES[1]);
            let (mut from, log) = Monitor::new(&memory, &Running::default(), CALM);
            from.start();
            let listener = Listener::bind(Network::new(1).port("there")).unwrap();
            let address = listener.local_address();
            let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
            let error = std::thread::scope(|scope| {
                let stop = incoming.stop_handle();
                scope.spawn(move || {
                    let handshake =
                        Handshake { takes: &[(Mode::Embedded, FEATURES)], refusals: &|_| Vec::new(), describe: None };
                    let accepted = handshake.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
                    let (sender, news) = channel();
                    let on_event: OnConnectionEvent = Arc::new(move |event| drop(sender.send(event)));
                    let events = link_events(&on_event, 1);
                    let (writer, reader, closer) = (accepted.writer, accepted.reader, accepted.closer);
                    let link = ControlLink::start(writer, reader, closer, accepted.messages, events).unwrap();
                    let mut peer = Peer::new(link);
                    peer.send(&ControlMessage::Welcome(accepted.welcome));
                    let channels = std::thread::spawn(move || {
                        // The channels are only kept open.
                        let mut kept = Vec::new();
                        while let Some((connection, _)) = incoming.next() {
                            kept.extend(accept_channel(connection));
                        }
                    });
                    // Messages without effect, and others.
                    peer.send(&ControlMessage::DeviceTaken { device: 99 });
                    peer.send(&ControlMessage::DeviceLoaded { device: 99 });
                    peer.send(&odd);
                    for event in news {
                        if let Some(PeerEvent::Lost(_) | PeerEvent::Message(ControlMessage::Failed(_), _)) =
                            peer.handle(event)
                        {
                            break;
                        }
                    }
                    stop.stop();
                    channels.join().unwrap();
                });
                let limits = TimeLimits::default().reporting_abort(Duration::from_millis(100));
                let mut source = devices().at_source(Source::new(memory.ram(), Box::new(log))).time_limits(limits);
                source.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap_err()
            });
            assert!(from.runs() && error.guest == GuestState::RunsAtSource, "{error}");
            assert!(error.reason.contains(words), "{error}");
            from.stop();
        }
    });
}
