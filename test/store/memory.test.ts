import { MemoryStore } from '../../src/store/memory.ts'
import { storeContract } from './contract.ts'

storeContract('in memory', () => Promise.resolve(new MemoryStore()))
