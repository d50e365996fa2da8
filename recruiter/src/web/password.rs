//! Passwords, as argon2id hashes.

use argon2::{
    Argon2, Params,
    password_hash::{PasswordHasher as _, PasswordVerifier as _, phc::PasswordHash},
};
use serde::{Deserialize, Deserializer, de::Error as _};

/// The longest password, in bytes.
const LONGEST: usize = 1_024;
/// The most memory that a hash may need, in KiB.
const MOST_MEMORY: u32 = 1 << 20;

/// The hash of a password.
#[derive(Clone, Debug)]
pub(super) struct Hash(PasswordHash);

impl Hash {
    /// # Errors
    /// When the password cannot be hashed.
    pub(super) fn of(password: &str) -> Result<Self, String> {
        Argon2::default().hash_password(password.as_bytes()).map(Self).map_err(|error| error.to_string())
    }

    /// Whether it is that of this password. This takes tens of milliseconds, and 19 MiB with the usual parameters.
    pub(super) fn is_of(&self, password: &str) -> bool {
        password.len() <= LONGEST && Argon2::default().verify_password(password.as_bytes(), &self.0).is_ok()
    }

    pub(super) fn text(&self) -> String {
        self.0.to_string()
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let hash = PasswordHash::new(text.trim()).ok().filter(|hash| hash.algorithm.as_str() == "argon2id" && hash.hash.is_some());
        let is_usable = |hash: &PasswordHash| Params::try_from(hash).is_ok_and(|params| params.m_cost() <= MOST_MEMORY);
        let problem = "password begins with `$argon2id$`, and needs at most 1 GiB; `recruiter web password` prints one";
        hash.filter(is_usable).map(Self).ok_or_else(|| D::Error::custom(problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_of_one_password_and_of_the_right_kind() {
        let hash = Hash::of("correct horse").unwrap();
        assert!(hash.is_of("correct horse") && !hash.is_of("correct horse ") && !hash.is_of(&"x".repeat(LONGEST + 1)));
        assert!(hash.text().starts_with("$argon2id$v=19$m=19456,t=2,p=1$"), "{}", hash.text());
        let read = |text: &str| toml::Value::String(text.into()).try_into::<Hash>();
        assert!(read(&hash.text()).is_ok_and(|read| read.is_of("correct horse")));
        let bare = "$argon2id$v=19$m=19456,t=2,p=1$c29tZXNhbHQxMjM0NTY3OA";
        for wrong in ["", "secret", bare, &hash.text().replace("argon2id", "argon2i"), &hash.text().replace("19456", "4000000")] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
