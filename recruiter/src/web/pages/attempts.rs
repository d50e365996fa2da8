//! How often somebody tries to log in: so many times from an address, and so many with a name, within a period.

use std::{
    collections::HashMap,
    hash::Hash,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};

/// The period.
const PERIOD: Duration = Duration::from_secs(5 * 60);
/// Attempts from one address.
const OF_ADDRESS: u32 = 10;
/// Attempts with one name, from all addresses: more than one address has, so that one person cannot lock out another alone.
const OF_NAME: u32 = 100;
/// Maximum number of addresses, and of names, that are remembered. A further one makes room of the oldest.
const MOST: usize = 10_000;

/// The attempts of the last minutes.
#[derive(Default)]
pub(super) struct Attempts(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    addresses: Counts<IpAddr>,
    names: Counts<Name>,
    /// From where somebody has logged in with a name: the guesses of others do not count there.
    known: Counts<(IpAddr, Name)>,
}

/// The SHA-256 of a name, which may be long.
type Name = [u8; 32];
type Counts<K> = HashMap<K, (Instant, u32)>;

impl Attempts {
    /// Counts an attempt. `false`: there were too many.
    pub(super) fn begin(&self, from: IpAddr, name: &str) -> bool {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (address, name) = (network(from), Sha256::digest(name).into());
        let is_known = kept.known.contains_key(&(address, name));
        count(&mut kept.addresses, address) <= OF_ADDRESS && (is_known || count(&mut kept.names, name) <= OF_NAME)
    }

    /// Somebody has logged in: this attempt was no guess.
    pub(super) fn succeed(&self, from: IpAddr, name: &str) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (address, name) = (network(from), Sha256::digest(name).into());
        uncount(&mut kept.addresses, &address);
        if !kept.known.contains_key(&(address, name)) {
            uncount(&mut kept.names, &name);
        }
        count(&mut kept.known, (address, name));
    }
}

fn count<K: Copy + Eq + Hash>(counts: &mut Counts<K>, key: K) -> u32 {
    if !counts.contains_key(&key)
        && counts.len() >= MOST
        && let Some(oldest) = counts.iter().min_by_key(|(_, (since, _))| *since).map(|(key, _)| *key)
    {
        counts.remove(&oldest);
    }
    let (since, count) = counts.entry(key).or_insert_with(|| (Instant::now(), 0));
    if since.elapsed() >= PERIOD {
        (*since, *count) = (Instant::now(), 0);
    }
    *count += 1;
    *count
}

fn uncount<K: Eq + Hash>(counts: &mut Counts<K>, key: &K) {
    if let Some((_, count)) = counts.get_mut(key) {
        *count = count.saturating_sub(1);
    }
}

/// One customer of a provider has all addresses of an IPv6 network with a prefix of 48 bits or more.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 80 << 80).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_counted_by_address_and_by_name() {
        let attempts = Attempts::default();
        let from = |n: u8| IpAddr::from([10, 0, 0, n]);
        assert!((0..OF_ADDRESS).all(|_| attempts.begin(from(1), "ada")));
        attempts.succeed(from(1), "ada");
        assert!(
            attempts.begin(from(1), "bob") && !attempts.begin(from(1), "bob"),
            "who has an account cannot guess more often with others"
        );
        assert!(attempts.begin(from(2), "ada"));
        let mut all = (2..=255).map(|n| attempts.begin(from(n), "eve"));
        assert!(all.by_ref().take(usize::try_from(OF_NAME).unwrap()).all(|may| may) && !all.any(|may| may));
        attempts.succeed(from(0), "eve");
        assert!(attempts.begin(from(0), "eve") && !attempts.begin(from(250), "eve"), "guesses do not lock out who has logged in before");
        let same = |host: u16| IpAddr::from([0x2001, 0xdb8, 0, host, host, 0, 0, 1]);
        assert!((0..20).filter(|host| attempts.begin(same(*host), &host.to_string())).count() == 10, "one network");
    }

    #[test]
    fn no_more_addresses_are_remembered_than_there_is_room_for() {
        let attempts = Attempts::default();
        for n in 0..u32::try_from(MOST).unwrap() + 100 {
            attempts.begin(IpAddr::from(n.to_be_bytes()), &n.to_string());
        }
        let kept = attempts.0.lock().unwrap();
        assert_eq!((kept.addresses.len(), kept.names.len()), (MOST, MOST));
    }
}
