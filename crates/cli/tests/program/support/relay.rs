//! A hostile network: a relay between `send` and `receive` that damages one packet of a RAM channel, or stalls.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind};
use sterna_wire::limits::MAX_CONTENT;
use sterna_wire::packet::{PACKET_HEADER_LENGTH, PacketHeader, PacketKind, Run};

/// The damage to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoil {
    /// One bit of the payload differs.
    PayloadBit,
    /// One bit of the header differs.
    HeaderBit,
    /// It is sent twice.
    Twice,
    /// It is not sent.
    Lost,
    /// Its first run is beyond the end of the RAM block; checksums match.
    OutsideBlock,
    /// It names a RAM block that does not exist; checksums match.
    NoSuchBlock,
    /// It claims more payload than permitted; checksums match.
    HugePayload,
    /// It claims a longer table than permitted; checksums match.
    HugeTable,
    /// It claims less content than its table has; checksums match.
    WrongContent,
    /// It names a compression method that does not exist; checksums match.
    NoSuchMethod,
    /// The connection ends within the packet.
    Truncated,
    /// Nothing follows its first half, and the connection stays open.
    Silence,
}

impl Spoil {
    /// Every kind.
    pub(crate) const ALL: [Self; 12] = [
        Self::PayloadBit,
        Self::HeaderBit,
        Self::Twice,
        Self::Lost,
        Self::OutsideBlock,
        Self::NoSuchBlock,
        Self::HugePayload,
        Self::HugeTable,
        Self::WrongContent,
        Self::NoSuchMethod,
        Self::Truncated,
        Self::Silence,
    ];
}

/// Number of the damaged packet of pages on a RAM channel, from 0.
const DAMAGED_PACKET: usize = 20;

/// Starts a relay to `target`. Returns its address, and whether a packet has been damaged yet.
pub(crate) fn relay(target: &str, spoil: Spoil) -> (String, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (target, done) = (target.to_owned(), Arc::new(AtomicBool::new(false)));
    let spoilt = Arc::clone(&done);
    // These threads end with their connections; the listener's ends with the test's process.
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(&target) else { continue };
            let (mut back_in, mut back_out) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = io::copy(&mut back_in, &mut back_out);
                let _ = back_out.shutdown(Shutdown::Both);
            });
            let spoilt = Arc::clone(&spoilt);
            std::thread::spawn(move || {
                let _ = forward(&near, &far, spoil, &spoilt);
                let _ = far.shutdown(Shutdown::Both);
                let _ = near.shutdown(Shutdown::Both);
            });
        }
    });
    (address, done)
}

fn forward(mut near: &TcpStream, mut far: &TcpStream, spoil: Spoil, spoilt: &AtomicBool) -> io::Result<()> {
    let mut header = [0; CHANNEL_HEADER_LENGTH];
    near.read_exact(&mut header)?;
    far.write_all(&header)?;
    if ChannelHeader::decode(&header).is_ok_and(|header| header.kind == ChannelKind::Ram) {
        let mut pages = 0;
        while !spoilt.load(Ordering::Acquire) {
            let packet = Packet::read(near)?;
            if packet.header.kind == PacketKind::Pages && packet.header.payload_length > 0 {
                pages += 1;
            }
            if pages > DAMAGED_PACKET && !spoilt.swap(true, Ordering::AcqRel) {
                return packet.spoil(near, far, spoil);
            }
            far.write_all(&packet.encode())?;
        }
    }
    io::copy(&mut near, &mut far).map(drop)
}

struct Packet {
    header: PacketHeader,
    table: Vec<u8>,
    payload: Vec<u8>,
}

impl Packet {
    fn read(mut from: &TcpStream) -> io::Result<Self> {
        let mut bytes = [0; PACKET_HEADER_LENGTH];
        from.read_exact(&mut bytes)?;
        let header = PacketHeader::decode(&bytes, MAX_CONTENT).expect("what send writes is right");
        let (mut table, mut payload) = (vec![0; header.table_length as usize], vec![0; header.payload_length as usize]);
        from.read_exact(&mut table)?;
        from.read_exact(&mut payload)?;
        Ok(Self { header, table, payload })
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.header.encode(&self.table).to_vec();
        bytes.extend_from_slice(&self.table);
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// Writes it damaged, and then forwards the following bytes.
    fn spoil(mut self, mut near: &TcpStream, mut far: &TcpStream, spoil: Spoil) -> io::Result<()> {
        let mut bytes = self.encode();
        match spoil {
            Spoil::PayloadBit => *bytes.last_mut().unwrap() ^= 1,
            Spoil::HeaderBit => bytes[8] ^= 1,
            Spoil::Twice => bytes.extend_from_within(..),
            Spoil::Lost => bytes.clear(),
            Spoil::OutsideBlock => {
                let run = Run::decode(self.table[..8].try_into().unwrap()).unwrap();
                let far_away = Run { first: (1 << 40) - u64::from(run.count), ..run };
                // It is the only run in the table, since runs must ascend.
                self.table = far_away.encode().to_vec();
                self.header.table_length = 8;
                bytes = self.encode();
            }
            Spoil::NoSuchBlock => {
                self.header.subject = u16::MAX;
                bytes = self.encode();
            }
            Spoil::HugePayload => {
                self.header.payload_length = u32::MAX;
                bytes = self.encode();
            }
            Spoil::HugeTable => {
                // The header's checksum covers the table, which is not sent: the limit must be checked first.
                let table = std::mem::take(&mut self.table);
                self.header.table_length = 0;
                bytes = self.header.encode(&[]).to_vec();
                bytes[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
                bytes.extend_from_slice(&table);
            }
            Spoil::WrongContent => {
                self.header.content_length -= 4096;
                bytes = self.encode();
            }
            Spoil::NoSuchMethod => {
                self.header.method = 250;
                bytes = self.encode();
            }
            Spoil::Truncated => return far.write_all(&bytes[..bytes.len() / 2]),
            Spoil::Silence => {
                far.write_all(&bytes[..bytes.len() / 2])?;
                // Until the sender ends the connection.
                return io::copy(&mut near, &mut io::sink()).map(drop);
            }
        }
        far.write_all(&bytes)?;
        io::copy(&mut near, &mut far).map(drop)
    }
}

/// Which connections stall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Still {
    /// The channels of pages and of the state.
    Data,
    /// All connections.
    All,
}

/// Starts a relay to `target`. Once the second returned value is set, the connections that `still` selects stay open
/// but forward nothing, in either direction. Returns the relay's address.
pub(crate) fn still_relay(target: &str, still: Still) -> (String, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (target, stalled) = (target.to_owned(), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&stalled);
    // Stalled threads end with the test's process, all others with their connections.
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(&target) else { continue };
            let told = Arc::clone(&told);
            std::thread::spawn(move || {
                let mut header = [0; CHANNEL_HEADER_LENGTH];
                if (&near).read_exact(&mut header).and_then(|()| (&far).write_all(&header)).is_err() {
                    return;
                }
                let control = ChannelHeader::decode(&header).is_ok_and(|header| header.kind == ChannelKind::Control);
                let stalled = if control && still == Still::Data { Arc::default() } else { told };
                let (back_in, back_out) = (far.try_clone().unwrap(), near.try_clone().unwrap());
                let also = Arc::clone(&stalled);
                std::thread::spawn(move || pass(&back_in, &back_out, &also));
                pass(&near, &far, &stalled);
            });
        }
    });
    (address, stalled)
}

/// Forwards bytes until `stalled` is set; then stalls for ever.
fn pass(mut from: &TcpStream, mut to: &TcpStream, stalled: &AtomicBool) {
    let mut bytes = vec![0; 64 << 10];
    // The end of a connection is not forwarded either.
    let wait = || {
        while stalled.load(Ordering::Acquire) {
            std::thread::park();
        }
    };
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        wait();
        if to.write_all(&bytes[..length]).is_err() {
            break;
        }
    }
    wait();
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// A network whose connections can be cut; new connections work again.
pub(crate) struct Network {
    pub(crate) address: String,
    connections: Arc<Mutex<Vec<TcpStream>>>,
    refuses: Arc<AtomicBool>,
}

impl Network {
    pub(crate) fn to(destination: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let network = Self { address, connections: Arc::default(), refuses: Arc::default() };
        let (destination, connections) = (destination.to_owned(), Arc::clone(&network.connections));
        let refuses = Arc::clone(&network.refuses);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if refuses.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(&destination) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().unwrap();
                connections.lock().unwrap().extend([clone(&near), clone(&far)]);
                for (mut from, mut to) in [(clone(&near), clone(&far)), (far, near)] {
                    std::thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        network
    }

    pub(crate) fn cut(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Cuts all connections, and ends every new one at once.
    pub(crate) fn cut_for_good(&self) {
        self.refuses.store(true, Ordering::SeqCst);
        self.cut();
    }
}
